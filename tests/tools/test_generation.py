"""Tests of generation.py and trained_model.py, against transformers, and of scripts/generate.py."""

import io
import json
import os
import re
import shutil
import signal
from random import Random

import pytest
import torch
from tokenizers import Tokenizer, decoders, normalizers, processors
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.harness import start_ranks
from tests.support.runs import options, train_rank
from tests.tools.test_kv_cache import generator_of
from torchtitan_clone.checkpoint.folder import MANIFEST_FILE, PROGRESS_FILE, read_manifest, write_manifest
from torchtitan_clone.checkpoint.writer import write_file
from torchtitan_clone.commands import convert_to_hf
from torchtitan_clone.commands import generate as script
from torchtitan_clone.data import build_tokenizer
from torchtitan_clone.tools.generation import Generator, Sampling, choose, read_prompts
from torchtitan_clone.tools.trained_model import open_trained_model


def test_samples_depend_on_the_seed_only():
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    hot = {"temperature": 2.0, "seed": 3}
    generator = generator_of("llama3", use_cache=True, **hot)
    both = list(generator.complete(prompts))
    assert both == list(generator_of("llama3", use_cache=True, **hot, batch_size=1).complete(prompts))
    assert both[:1] == list(generator.complete(prompts[:1]))
    assert both != list(generator_of("llama3", use_cache=True, temperature=2.0, seed=4).complete(prompts))
    # The most likely token alone is left.
    greedy = list(generator_of("llama3", use_cache=True).complete(prompts))
    assert list(generator_of("llama3", use_cache=True, **hot, top_k=1).complete(prompts)) == greedy
    assert list(generator_of("llama3", use_cache=True, **hot, top_p=1e-6).complete(prompts)) == greedy
    few = {token for ids in generator_of("llama3", use_cache=True, **hot, top_k=3).complete(prompts) for token in ids}
    assert len(few) > 1
    assert both != greedy


def die_while_saving(argv, logs):
    """Trains, and is killed when the first file of step 4 has been written but not the others."""
    fsync = os.fsync

    def kill(descriptor):
        fsync(descriptor)
        if "step-4.partial" in os.readlink(f"/proc/self/fd/{descriptor}"):
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = kill
    return train_rank(argv, logs)


@pytest.fixture(scope="module")
def killed_run(corpus, tmp_path_factory):
    """Returns the folder of a run on two ranks that were killed in the middle of a save."""
    folder = tmp_path_factory.mktemp("killed")
    changes = {"parallelism__tensor_parallel_degree": 2, "checkpoint__interval": 2, "optimizer__lr": 1e-2}
    argv = options(corpus, folder, **changes)
    for rank in start_ranks(die_while_saving, 2, argv, [folder / "0.log", folder / "1.log"]):
        rank.process.join(60)
        assert rank.process.exitcode == -signal.SIGKILL
    assert list((folder / "run" / "checkpoint").glob("step-4.partial*"))
    return folder / "run"


def test_a_run_that_was_killed_while_saving_can_be_sampled_from(killed_run, tmp_path, capsys):
    """The newest complete step, its export and transformers give the same text."""
    step, export = killed_run / "checkpoint" / "step-2", tmp_path / "hub"
    convert_to_hf.convert(step, export, dtype=torch.float32, hf_assets_path=None)
    prompts = ["import os\n", "def main(", "class A:"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts[1:]) + "\n")
    words = [f"--prompt={prompts[0]}", f"--prompt_file={tmp_path / 'prompts.txt'}", "--max_new_tokens=20"]
    texts = []
    for folder in (killed_run, killed_run / "checkpoint", step, export):
        assert script.main([str(folder), *words]) == 0
        texts.append(capsys.readouterr().out)
    assert texts == [texts[0]] * 4
    tokenizer = build_tokenizer(None)
    theirs = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    continued = []
    for prompt, ids in zip(prompts, tokenizer.encode_batch(prompts), strict=True):
        out = theirs.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False, pad_token_id=0)[0, len(ids) :]
        text = tokenizer.decode([token for token in out.tolist() if token != tokenizer.eos_id])
        continued.append(f"{prompt}{text}\n{'-' * 40}\n")
    assert texts[0] == "".join(continued)


def with_beginning_token(folder):
    """Writes the tokenizer of the package, with a post-processor that puts its token 0 before texts."""
    end = "<|end_of_text|>"
    backend = Tokenizer.from_str(build_tokenizer(None).backend.to_str())
    backend.post_processor = processors.TemplateProcessing(single=f"{end} $A", special_tokens=[(end, 0)])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end, "bos_token": end}))
    return folder


def test_a_beginning_token_precedes_prompts_as_in_transformers(killed_run, tmp_path, capsys):
    """A prompt may then be empty. The export states the token, and puts it before texts too."""
    folder, export = with_beginning_token(tmp_path / "tokenizer"), tmp_path / "hub"
    step = killed_run / "checkpoint" / "step-2"
    convert_to_hf.convert(step, export, dtype=torch.float32, hf_assets_path=str(folder))
    for name in ("config.json", "generation_config.json"):
        assert json.loads((export / name).read_text())["bos_token_id"] == 0
    words, theirs = AutoTokenizer.from_pretrained(export), AutoModelForCausalLM.from_pretrained(export)
    prompts, expected = ["import os\n", "", "def main("], []
    for prompt in prompts:
        ids = words(prompt, return_tensors="pt").input_ids
        assert ids[0, 0] == 0
        out = theirs.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        text = words.decode([token for token in out.tolist() if token])
        expected.append(f"{prompt}{text}\n{'-' * 40}\n")
    for argv in ([str(killed_run), f"--hf_assets_path={folder}"], [str(export)]):
        assert script.main([*argv, "--max_new_tokens=12", *(f"--prompt={prompt}" for prompt in prompts)]) == 0
        assert capsys.readouterr().out == "".join(expected)


def test_an_export_has_the_ends_padding_and_template_of_the_folder(killed_run, tmp_path, capsys):
    """Text ends at each of them, here and in transformers."""
    assets, export, step = tmp_path / "tokenizer", tmp_path / "hub", killed_run / "checkpoint" / "step-2"
    with_beginning_token(assets)
    trained = open_trained_model(step, dtype=torch.float32, device=torch.device("cpu"), hf_assets_path=str(assets))
    generator = Generator(trained, sampling=Sampling(max_new_tokens=12))
    (ids,) = generator.complete(generator.encode(["import os\n"]))
    stop = next(token for index, token in enumerate(ids) if index > 2 and token not in ids[:index])
    (assets / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, stop, 2048]}))
    config = json.loads((assets / "tokenizer_config.json").read_text())
    pad = trained.tokenizer.backend.id_to_token(9)
    (assets / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": pad}))
    (assets / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    convert_to_hf.convert(step, export, dtype=torch.float32, hf_assets_path=str(assets))
    found = {name: json.loads((export / name).read_text()) for name in ("config.json", "generation_config.json")}
    assert [each["pad_token_id"] for each in found.values()] == [9, 9]
    assert [each["eos_token_id"] for each in found.values()] == [0, [0, stop]]
    words, theirs = AutoTokenizer.from_pretrained(export), AutoModelForCausalLM.from_pretrained(export)
    out = theirs.generate(**words("import os\n", return_tensors="pt"), max_new_tokens=12, do_sample=False)
    end = ids.index(stop)
    assert out[0].tolist() == [*words("import os\n").input_ids, *ids[: end + 1]]
    argv = [f"--hf_assets_path={assets}", "--max_new_tokens=12", "--prompt=import os\n"]
    for given in ([str(killed_run), *argv], [str(export), *argv[1:]]):
        assert script.main(given) == 0
        assert capsys.readouterr().out == f"import os\n{trained.tokenizer.decode(ids[:end])}\n{'-' * 40}\n"
    prompt = "x<|end_of_text|>import"
    for parses in (False, True):
        given = Generator(trained, sampling=Sampling(max_new_tokens=2), parse_special_tokens=parses).encode([prompt])
        assert given == [words(prompt, split_special_tokens=not parses).input_ids]
    assert script.main([str(export), "--parse_special_tokens", "--max_new_tokens=12", f"--prompt={prompt}"]) == 0
    out = theirs.generate(**words(prompt, return_tensors="pt"), max_new_tokens=12, do_sample=False)[0].tolist()
    continued = words.decode(out[len(given[0]) :]).removesuffix(words.decode(stop))
    assert capsys.readouterr().out == f"{prompt}{continued}\n{'-' * 40}\n"
    chat = [{"role": "user", "content": "hi"}]
    assert words.apply_chat_template(chat, tokenize=False) == "<user>hi"


def test_a_checkpoint_of_version_0_1_has_no_beginning_token(killed_run, tmp_path):
    """That version trained without one, and recorded the digest of tokenizer.json alone."""
    assets, step = str(with_beginning_token(tmp_path / "tokenizer")), tmp_path / "step-2"
    shutil.copytree(killed_run / "checkpoint" / "step-2", step)
    manifest, progress = read_manifest(step), json.loads((step / PROGRESS_FILE).read_text())
    for tokenizer, bos_id in ((build_tokenizer(assets).fingerprint, 0), (build_tokenizer(assets).digest, None)):
        progress["data"]["tokenizer"] = tokenizer
        (step / PROGRESS_FILE).unlink()
        record = write_file(step / PROGRESS_FILE, [json.dumps(progress).encode()])
        (step / MANIFEST_FILE).unlink()
        write_manifest(step, step=2, files={**manifest.files, PROGRESS_FILE: record})
        opened = open_trained_model(step, dtype=torch.float32, device=torch.device("cpu"), hf_assets_path=assets)
        assert opened.tokenizer.bos_id == bos_id
        export = tmp_path / f"hub-{bos_id}"
        convert_to_hf.convert(step, export, dtype=torch.float32, hf_assets_path=assets)
        assert json.loads((export / "config.json").read_text())["bos_token_id"] == bos_id


def test_lines_of_standard_input_are_prompts(killed_run, capsys, monkeypatch):
    words = [str(killed_run), "--max_new_tokens=8", "--temperature=1", "--dtype=bfloat16"]
    assert script.main([*words, "--prompt=def main("]) == 0
    text = capsys.readouterr().out.removeprefix("def main(").rpartition("\n" + "-" * 40)[0]
    monkeypatch.setattr("sys.stdin", io.StringIO("\ndef main(\n"))
    assert script.main(words) == 0
    out, error = capsys.readouterr()
    assert out == f"{text}\n"
    assert "error: prompt 1 is empty" in error


ERRORS = {
    "unknown folder": (["nowhere"], "nowhere: there is no such folder"),
    "an id of the hub": (
        ["org/name"],
        "is a model of the Hugging Face hub, download it (`hf download org/name`)",
    ),
    "no step": (["."], "the folder has no complete checkpoint"),
    "empty prompt": (["RUN", "--prompt=a", "--prompt="], "prompt 2 is empty"),
    "not UTF-8": (["RUN", "--prompt=a", "--prompt=\udcff"], "prompt 2 is not valid UTF-8"),
    "long prompt": (["RUN", f"--prompt={'x = 1; ' * 3000}"], "more than the 8,192 of the model's context"),
    "too many new": (["RUN", "--prompt=a", "--max_new_tokens=8192"], "with --max_new_tokens=8192 more than"),
    "no tokens": (["RUN", "--prompt=a", "--max_new_tokens=0"], "--max_new_tokens = 0: must be from 1"),
    "cold": (["RUN", "--prompt=a", "--temperature=0"], "--temperature = 0.0: must be from 1e-06"),
    "not a number": (["RUN", "--prompt=a", "--temperature=nan"], "--temperature = nan: must be from 1e-06"),
    "top_p": (["RUN", "--prompt=a", "--temperature=1", "--top_p=1.5"], "--top_p = 1.5: must be above 0 and at most 1"),
    "top_k alone": (["RUN", "--prompt=a", "--top_k=5"], "require --temperature"),
    "no file": (["RUN", "--prompt_file=none.txt"], "--prompt_file=none.txt cannot be read"),
    "no text": (["RUN", "--prompt_file=/dev/null"], "--prompt_file=/dev/null cannot be read"),
    "tokenizer": (["RUN", "--prompt=a", "--hf_assets_path=."], "the folder has no tokenizer.json"),
}


def test_only_ends_of_lines_divide_a_file_of_prompts(tmp_path):
    (tmp_path / "prompts.txt").write_bytes("a\x0cb\r\n\u2028c\n".encode())
    assert read_prompts(tmp_path / "prompts.txt") == ["a\x0cb", "\u2028c"]


def test_the_space_before_a_continuation_is_kept(killed_run, tmp_path, capsys, monkeypatch):
    """Decoders of the SentencePiece format remove the first space of a text."""
    words = Tokenizer(WordLevel({f"\u2581w{token}": token for token in range(2048)}, unk_token="\u2581w0"))
    words.normalizer = normalizers.Prepend("\u2581")
    words.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "\u2581w0"}')
    argv = [str(killed_run), "--max_new_tokens=3", f"--hf_assets_path={tmp_path}"]
    assert script.main([*argv, "--prompt=w5"]) == 0
    text = capsys.readouterr().out
    assert re.match(r"w5( w\d+){3}\n-", text)
    monkeypatch.setattr("sys.stdin", io.StringIO("w5\n"))
    assert script.main(argv) == 0
    assert capsys.readouterr().out == text.removeprefix("w5").partition("-")[0]


@pytest.mark.parametrize("name", ERRORS)
def test_one_line_says_what_is_wrong(name, killed_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, message = ERRORS[name]
    assert script.main([str(killed_run) if word == "RUN" else word for word in words]) == 2
    out, error = capsys.readouterr()
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not out


def test_a_folder_of_an_unknown_family_is_refused(killed_run, tmp_path, capsys):
    export = tmp_path / "hub"
    convert_to_hf.convert(killed_run / "checkpoint" / "step-2", export, dtype=torch.float32, hf_assets_path=None)
    file = export / "config.json"
    file.write_text(file.read_text().replace('"model_type": "llama"', '"model_type": "mamba"'))
    assert script.main([str(export), "--prompt=a"]) == 2
    assert "model_type = 'mamba': no family has this type; known families: llama3" in capsys.readouterr().err


def test_damaged_weights_are_refused(killed_run, tmp_path, capsys):
    damaged = shutil.copytree(killed_run / "checkpoint" / "step-2", tmp_path / "step-2")
    file = damaged / "rank-1.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert script.main([str(damaged), "--prompt=a"]) == 2
    assert "rank-1.safetensors does not match its digest" in capsys.readouterr().err


def test_the_largest_number_that_can_be_drawn_chooses_a_token_with_a_share():
    class Largest(Random):
        def random(self):
            return 1 - 2**-53  # 1 in float32

    logits = torch.zeros(1, 50)
    for top_k, most in ((None, 50), (3, 3)):
        sampling = Sampling(max_new_tokens=1, temperature=1.0, top_k=top_k)
        order = logits.softmax(dim=-1).sort(dim=-1, descending=True).indices
        assert choose(logits, sampling=sampling, draws=[Largest()]).item() == order[0, most - 1]
