"""Compares a folder in the format of the Hugging Face hub with what serving engines make of it.

An *engine* is transformers or vLLM; each loads the folder by itself, and has to agree with the model that is read here.
"""

import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.started import as_started
from torchtitan_clone.data.chat import TEMPLATE_FILE
from torchtitan_clone.data.tokenizer import CONFIG_FILE as TOKENIZER_CONFIG
from torchtitan_clone.data.tokenizer import GENERATION_FILE
from torchtitan_clone.documents import find_member, parse_json, read_member, shorten
from torchtitan_clone.hub.export import FILE_BYTES
from torchtitan_clone.hub.folder import CONFIG_FILE, INDEX_FILE
from torchtitan_clone.tools.generation import Generator, Sampling
from torchtitan_clone.tools.trained_model import TrainedModel, open_trained_model

TOLERANCE = 1e-4
"""Most that logits in float32 may differ, as a share of the largest one."""
_OLD_KEYS = ("rope_theta", "rope_scaling")
_NEW_KEY = "rope_parameters"
_CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@dataclass(frozen=True, kw_only=True)
class Check:
    """What was compared, and what differs; nothing does if `problems` is empty."""

    name: str
    problems: list[str]

    def describe(self) -> str:
        """Returns one line."""
        return f"{self.name}: {'; '.join(self.problems) or 'ok'}"


def check_folder(folder: Path, *, prompts: Sequence[str], max_new_tokens: int) -> Iterator[Check]:
    """Yields the checks of a folder one after another; ConfigError if it cannot be read here."""
    cpu = torch.device("cpu")
    trained = open_trained_model(folder, dtype=torch.float32, device=cpu)
    folder = trained.path
    if find_member(folder, name=CONFIG_FILE) is None:
        rule = f"has no {CONFIG_FILE}, so that it is not in the format of the Hugging Face hub"
        raise ConfigError(f"{folder}: {rule}; {as_started('make one that is with scripts/convert_to_hf.py')}")
    generator = Generator(trained, sampling=Sampling(max_new_tokens=max_new_tokens))
    encoded = generator.encode(prompts)
    expected = list(generator.complete(encoded))
    given = {"trained": trained, "encoded": encoded, "expected": expected, "max_new_tokens": max_new_tokens}
    yield _checked("files", lambda: _compare_files(folder))
    yield _checked("keys of rotary positions", lambda: _compare_rope_keys(folder))
    yield _checked("tokenizer", lambda: _compare_tokenizer(folder, trained=trained, prompts=prompts, encoded=encoded))
    yield _checked("transformers", lambda: _compare_transformers(folder, **given))
    if importlib.util.find_spec("vllm") is not None:
        yield _checked("vLLM", lambda: _compare_vllm(folder, **given))


def _checked(name: str, find: Callable[[], Iterator[str]]) -> Check:
    try:
        return Check(name=name, problems=list(find()))
    except Exception as error:  # noqa: BLE001, an engine may raise anything
        return Check(name=name, problems=[shorten(f"{type(error).__name__}: {error}")])


def _read(folder: Path, name: str) -> dict[str, Any]:
    content = read_member(folder, name=name)
    return {} if content is None else dict(parse_json(content, where=name).plain_entries())


def _compare_files(folder: Path) -> Iterator[str]:
    """Sizes, and what an engine looks for beside the weights."""
    for name in (GENERATION_FILE, TOKENIZER_CONFIG):
        if find_member(folder, name=name) is None:
            yield f"{name} is missing"
    config = _read(folder, CONFIG_FILE)
    yield from (f"{CONFIG_FILE} has no {key}" for key in ("architectures", "dtype") if not config.get(key))
    index = _read(folder, INDEX_FILE)
    for path in folder.glob("*.safetensors"):
        if path.stat().st_size > FILE_BYTES + (1 << 24) and index:  # and its header
            yield f"{path.name} has more than {FILE_BYTES:,} bytes"
    if index and {path.name for path in folder.glob("*.safetensors")} != {*index["weight_map"].values()}:
        yield f"{INDEX_FILE} names other files than the folder has"


def _compare_rope_keys(folder: Path) -> Iterator[str]:
    """Of older engines and of newer ones: transformers has to read the same of either, if it reads both."""
    config = _read(folder, CONFIG_FILE)
    table = config.get(_NEW_KEY, {})
    if table is None or (isinstance(table, dict) and table.get("rope_theta", 1.0) is None):
        return  # a model without rotary positions
    if absent := [key for key in (*_OLD_KEYS, _NEW_KEY) if key not in config]:
        yield f"{CONFIG_FILE} has no {', '.join(absent)}, which some engines read"
        return
    old = _read_by_transformers({key: value for key, value in config.items() if key != _NEW_KEY})
    new = _read_by_transformers({key: value for key, value in config.items() if key not in _OLD_KEYS})
    yield from (
        f"{key} is {shorten(str(old.get(key)))} with the older keys, and {shorten(str(value))} with {_NEW_KEY}"
        for key, value in new.items()
        if old.get(key) not in (value, None)
    )


def _read_by_transformers(config: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, CONFIG_FILE).write_text(json.dumps(config))
        read = AutoConfig.from_pretrained(folder).to_dict()
    return {key: value for key, value in read.items() if not key.startswith("_")}


def _compare_tokenizer(
    folder: Path, *, trained: TrainedModel, prompts: Sequence[str], encoded: Sequence[Sequence[int]]
) -> Iterator[str]:
    from transformers import AutoTokenizer

    ours, theirs = trained.tokenizer, AutoTokenizer.from_pretrained(folder)
    for prompt, ids in zip(prompts, encoded, strict=True):
        if theirs(prompt)["input_ids"] != ids:
            yield f"other ids of the prompt {shorten(prompt, max_chars=40)!r}"
    if theirs.eos_token_id != ours.eos_id:
        yield f"eos_token_id is {theirs.eos_token_id}, and {ours.eos_id} here"
    generation = _read(folder, GENERATION_FILE)
    for name, token_id in {"eos_token_id": ours.eos_id, "bos_token_id": ours.bos_id}.items():
        found = _read(folder, CONFIG_FILE).get(name)
        if token_id is not None and token_id not in (found if isinstance(found, list) else [found]):
            yield f"{CONFIG_FILE} has {name} = {found}, and the tokenizer {token_id}"
    ends = generation.get("eos_token_id")
    if ours.eos_id not in (ends if isinstance(ends, list) else [ends]):
        yield f"{GENERATION_FILE} has eos_token_id = {ends}, without {ours.eos_id}"
    if find_member(folder, name=TEMPLATE_FILE) is not None and not theirs.apply_chat_template(_CHAT, tokenize=False):
        yield "the chat template renders nothing"


def _compare_transformers(
    folder: Path, *, trained: TrainedModel, encoded: Sequence[list[int]], expected: list[list[int]], max_new_tokens: int
) -> Iterator[str]:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    theirs, info = loaded
    yield from (
        f"{kind} {shorten(str(sorted(info[kind])))}" for kind in ("missing_keys", "unexpected_keys") if info[kind]
    )
    largest = difference = 0.0
    found: list[list[int]] = []
    for ids in encoded:
        tokens_BT = torch.tensor([ids])
        with torch.no_grad():
            logits = theirs(tokens_BT).logits
            ours = trained.model(tokens_BT, positions_BT=torch.arange(len(ids))[None])
        width = min(logits.shape[-1], ours.shape[-1])
        difference = max(difference, (logits[..., :width] - ours[..., :width]).abs().max().item())
        largest = max(largest, ours.abs().max().item())
        answer = theirs.generate(
            tokens_BT, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=trained.tokenizer.eos_id
        )
        found.append(answer[0, len(ids) :].tolist())
    if difference > TOLERANCE * largest:
        yield f"logits differ by {difference:.2g}, of at most {largest:.2g}"
    yield from _compare_tokens(found, expected=expected, trained=trained)


def _compare_vllm(
    folder: Path, *, trained: TrainedModel, encoded: Sequence[list[int]], expected: list[list[int]], max_new_tokens: int
) -> Iterator[str]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it prints to where the checks are
    import vllm  # pyright: ignore[reportMissingImports]

    longest = max(map(len, encoded)) + max_new_tokens
    engine = vllm.LLM(model=str(folder), dtype="float32", enforce_eager=True, max_model_len=longest)
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=max_new_tokens)
    answers = engine.generate([{"prompt_token_ids": ids} for ids in encoded], sampling)
    found = [list(answer.outputs[0].token_ids) for answer in answers]
    yield from _compare_tokens(found, expected=expected, trained=trained)


def _compare_tokens(found: list[list[int]], *, expected: list[list[int]], trained: TrainedModel) -> Iterator[str]:
    for number, (ids, ours) in enumerate(zip(found, expected, strict=True), start=1):
        ends = [place for place, token in enumerate(ids) if token in trained.tokenizer.end_ids]
        if ids[: ends[0] if ends else None] != ours:
            decoded = [shorten(trained.tokenizer.decode(each), max_chars=60) for each in (ids, ours)]
            yield f"continues prompt {number} with {decoded[0]!r}, and here it is {decoded[1]!r}"
