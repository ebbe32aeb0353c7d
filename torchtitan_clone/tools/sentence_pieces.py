"""Converts BPE models of SentencePiece to tokenizer.json, and compares the ids of texts with those of its own library.

A *piece* is a token of SentencePiece: a text without its spaces, which are the character U+2581. Pieces are normal,
unknown, control (such as <s>), user-defined, unused or a byte.

Source: arXiv 1808.06226.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import install
from torchtitan_clone.config.started import as_started
from torchtitan_clone.data.tokenizer import CONFIG_FILE, TOKENIZER_FILE, build_tokenizer
from torchtitan_clone.documents import read_regular, shorten
from torchtitan_clone.files import write_atomically

SPACE = "\u2581"
HARD_TEXTS = (
    "", " ", "  two  spaces ", "\ttab\n\nlines\n", "a", " a", f"{SPACE}a", "na\u00efve \u65e5\u672c \U0001f600",
    "<s> </s> <unk> <pad> <0x0A> <|im_start|>", "e\u0301 \ufb01 \u00a0 \u200b", "12345 0.5", "\0", "x" * 300,
)  # fmt: skip
"""Compared besides the texts that are given."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_BPE = 2
_MAX_BYTES = 1 << 28


def convert(file: Path, folder: Path, *, texts: Iterable[str]) -> int:
    """Writes tokenizer.json and tokenizer_config.json of a model into a folder; returns how many texts have equal ids.

    A tokenizer_config.json that the folder has is kept. ConfigError if the model is none of BPE, or has a rule that
    tokenizer.json lacks, or if the ids of a text differ: then nothing is written.
    """
    theirs, model = _open(file)
    if rule := _find_fault(model):
        remedy = as_started("choose another tokenizer, or train one with scripts/train_tokenizer.py")
        raise ConfigError(f"{file}: {rule}; {remedy}")
    backend = _fast_form(model)
    backend.encode_special_tokens = True
    compared = [*HARD_TEXTS, *texts]
    for text in compared:
        ours = backend.encode(text, add_special_tokens=False).ids
        if ours != (expected := theirs.encode(text)):
            raise ConfigError(f"{file}: {_describe_difference(text, ours, expected, backend=backend)}")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / CONFIG_FILE).exists():
        write_atomically(folder / CONFIG_FILE, json.dumps(_config(model), indent=2).encode() + b"\n")
    write_atomically(folder / TOKENIZER_FILE, backend.to_str(pretty=True).encode() + b"\n")
    build_tokenizer(str(folder))
    return len(compared)


def _open(file: Path) -> tuple[Any, Any]:
    """Returns the tokenizer of SentencePiece and what its file states; ConfigError if it is no such file."""
    try:
        from sentencepiece import SentencePieceProcessor
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError as error:
        raise ConfigError(
            f"{file}: is read by its own library, which is not installed: {install('sentencepiece')} protobuf"
        ) from error
    content = read_regular(file, max_bytes=_MAX_BYTES, follow_links=True)
    model = ModelProto()
    try:
        model.ParseFromString(content)
        return SentencePieceProcessor(model_proto=content), model
    except Exception as error:  # of protobuf, or of C++
        rule = f"no model of SentencePiece ({shorten(str(error))})"
        raise ConfigError(f"{file}: {rule}; give its tokenizer.model or spiece.model, not that of tiktoken.") from error


def _find_fault(model: Any) -> str:
    """Returns what tokenizer.json cannot state; "" if there is nothing."""
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    if trainer.model_type != _BPE:
        return "only models of BPE have the same ids in tokenizer.json; in others a text can spell out control pieces"
    if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        return "spaces are not at the start of its pieces"
    if normalizer.add_dummy_prefix and any(piece.type == _USER_DEFINED for piece in model.pieces):
        return "it puts a space before texts, which tokenizer.json would also put after user-defined pieces"
    return ""


def _fast_form(model: Any) -> tokenizers.Tokenizer:
    vocabulary = {piece.piece: token_id for token_id, piece in enumerate(model.pieces)}
    options = {"byte_fallback": model.trainer_spec.byte_fallback, "fuse_unk": True}
    unknown = next((piece.piece for piece in model.pieces if piece.type == _UNKNOWN), None)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [*_merges(model)], unk_token=unknown, **options))
    spec = model.normalizer_spec
    backend.normalizer = normalizers.Sequence([
        *([normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []),
        *([_replaced(r"\A +| +\z", ""), _replaced(" {2,}", " ")] if spec.remove_extra_whitespaces else []),
        *([normalizers.Prepend(SPACE)] if spec.add_dummy_prefix else []),
        normalizers.Replace(" ", SPACE),
    ])  # fmt: skip
    strip = [decoders.Strip(" ", 1, 0)] if spec.add_dummy_prefix else []
    restore = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(restore)
    named = [piece for piece in model.pieces if piece.type in (_UNKNOWN, _CONTROL)]
    backend.add_special_tokens([AddedToken(each.piece, special=True, normalized=False) for each in named])
    # They are looked for in what the normalizer returns, where a piece with a space is never found.
    own = [each.piece for each in model.pieces if each.type == _USER_DEFINED and " " not in each.piece]
    backend.add_tokens([AddedToken(each, normalized=True) for each in own])
    return backend


def _replaced(pattern: str, by: str) -> normalizers.Replace:
    return normalizers.Replace(tokenizers.Regex(pattern), by)


def _merges(model: Any) -> Iterator[tuple[str, str]]:
    """Yields every pair of pieces that makes one, in the order in which SentencePiece merges: by its score."""
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == _NORMAL}
    for piece in sorted(scores, key=lambda each: -scores[each]):
        pairs = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        yield from (pair for pair in pairs if pair[0] in scores and pair[1] in scores)


def _config(model: Any) -> dict[str, object]:
    trainer = model.trainer_spec
    ids = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id, "unk_token": trainer.unk_id}
    named = {name: model.pieces[token_id].piece for name, token_id in ids.items() if 0 <= token_id < len(model.pieces)}
    return {**named, "tokenizer_class": "PreTrainedTokenizerFast"}


def _describe_difference(text: str, ours: list[int], expected: list[int], *, backend: tokenizers.Tokenizer) -> str:
    place = next((n for n, pair in enumerate(zip(ours, expected, strict=False)) if pair[0] != pair[1]), 0)
    pieces = ["".join(map(str, map(backend.id_to_token, ids[place : place + 4]))) for ids in (expected, ours)]
    shown = shorten(repr(text), max_chars=80)
    return f"the ids of {shown} differ from its own: {pieces[0]!r} became {pieces[1]!r}; nothing was written."
