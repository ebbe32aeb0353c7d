"""Tokenizers: any tokenizer.json in the Hugging Face format."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.overlay import toml_like
from torchtitan_clone.config.remedies import describe_download
from torchtitan_clone.documents import DocumentError, Value, find_member, is_unicode, parse_json, read_member, shorten

SHIPPED_FOLDER = Path(__file__).parent / "assets" / "stdlib_tokenizer"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
MAX_ID = (1 << 24) - 1
_PANIC = "PanicException"
"""Class of the errors of Rust's `panic!`: a BaseException that cannot be imported."""
_FILES = (TOKENIZER_FILE, CONFIG_FILE, "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer, with the id of the end-of-text token, which follows every document."""

    backend: tokenizers.Tokenizer
    vocab_size: int
    """Highest id + 1; ids may have gaps."""
    eos_id: int
    fingerprint: str

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.backend.encode_special_tokens = True  # the library does not pickle it

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, without eos_id; special tokens spelled out in a text are encoded as text."""
        try:
            return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        except Exception as error:  # the library has no class of its own
            if type(error) is not Exception:
                raise
            raise ConfigError(f"the tokenizer of model.hf_assets_path: {error}; it must encode any text") from None

    def byte_lengths(self) -> list[int]:
        """Returns the bytes of text that each id stands for; 0 for special tokens and ids without a token."""
        added = self.backend.get_added_tokens_decoder()
        is_byte_level = "ByteLevel" in str(json.loads(self.backend.to_str()).get("decoder"))
        lengths = [0] * max(self.vocab_size, 1 + max(added, default=0))  # tokenizer_config.json may add higher ids
        for token, token_id in self.backend.get_vocab(with_added_tokens=True).items():
            if token_id in added:
                lengths[token_id] = 0 if added[token_id].special else len(token.encode(errors="replace"))
            else:
                # A character of a byte-level token is one byte; others mark a space and spell out single bytes.
                text = re.sub("<0x[0-9A-F]{2}>", "x", token.replace("\u2581", " "))
                lengths[token_id] = len(token if is_byte_level else text.encode(errors="replace"))
        return lengths[: self.vocab_size]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, special tokens included."""
        return self.backend.decode(list(ids), skip_special_tokens=False)


def build_tokenizer(hf_assets_path: str | None) -> Tokenizer:
    """Reads tokenizer.json, and the end-of-text token from tokenizer_config.json, in a folder; None: the package's.

    Adds the special tokens that only tokenizer_config.json has. ConfigError if a file is missing or invalid, or names
    no end-of-text token.
    """
    folder = SHIPPED_FOLDER if hf_assets_path is None else Path(hf_assets_path)
    option = f"model.hf_assets_path = {toml_like(str(folder))}"
    try:
        content = read_member(folder, name=TOKENIZER_FILE)
        if content is None:
            if not folder.is_dir():
                hint = describe_download(str(folder), repository="tokenizer")
                raise ConfigError(f"{option}: there is no such folder; set it to that of a tokenizer{hint}.")
            raise ConfigError(
                f"{option}: the folder has no {TOKENIZER_FILE}; set it to a folder with the tokenizer of a Hugging "
                "Face model, or leave it unset for the tokenizer of this package."
            )
        for name in _FILES:  # an export saves them all
            find_member(folder, name=name)
        backend = _parse_tokenizer(content)
        highest = max(backend.get_vocab(with_added_tokens=True).values())
        eos_id = _eos_id(backend, config=_read_config(folder), option=option)
    except (DocumentError, OSError) as error:
        raise ConfigError(f"{option}: {error}; correct the file, or download it again.") from error
    return Tokenizer(
        backend=backend,
        vocab_size=1 + max(highest, eos_id),
        eos_id=eos_id,
        fingerprint=hashlib.sha256(content).hexdigest(),
    )


def _parse_tokenizer(content: bytes) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(content.decode())
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise DocumentError(f"{TOKENIZER_FILE} is not a valid tokenizer ({shorten(str(error))})") from error
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    ids = backend.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise DocumentError(f"{TOKENIZER_FILE} has an empty vocabulary")
    if max(ids) > MAX_ID:  # the library takes minutes to write such a vocabulary
        raise DocumentError(f"{TOKENIZER_FILE} has a token with id {max(ids)}; at most {MAX_ID} is accepted")
    return backend


def tokenizer_files(hf_assets_path: str | None) -> dict[str, bytes]:
    """Returns the tokenizer's files by name, to be saved with an exported model. DocumentError if one is invalid."""
    folder = SHIPPED_FOLDER if hf_assets_path is None else Path(hf_assets_path)
    contents = {name: read_member(folder, name=name) for name in _FILES}
    found = {name: content for name, content in contents.items() if content is not None}
    # Without a class, transformers selects one by model type, and older versions then pre-tokenize differently.
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | {k: v.value for k, v in _read_config(folder).items()}
    return found | {CONFIG_FILE: json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"}


def _read_config(folder: Path) -> dict[str, Value]:
    content = read_member(folder, name=CONFIG_FILE)
    config = parse_json(b"{}" if content is None else content, where=CONFIG_FILE).entries()
    for name, entry in config.items():
        if not is_unicode(json.dumps([name, entry.value], ensure_ascii=False)):
            entry.refuse("must be valid Unicode, without halves of surrogate pairs")
    return config


def _eos_id(backend: tokenizers.Tokenizer, *, config: dict[str, Value], option: str) -> int:
    """Returns the id of the eos_token, in the file a string, or an object with the string "content"."""
    token = _content(config["eos_token"]) if "eos_token" in config else None
    _add_special_tokens(backend, config=config, eos_token=token)
    eos_id = None if token is None else backend.token_to_id(token)
    if eos_id is None:
        special = [added.content for added in backend.get_added_tokens_decoder().values() if added.special]
        found = "has no eos_token" if token is None else f"names the eos_token {shorten(repr(token))}, which has no id"
        listed = ", ".join(shorten(each) for each in special[:20])
        raise ConfigError(
            f"{option}: {CONFIG_FILE} {found}, but documents need a separator; set "
            f'"eos_token" in it to one of the special tokens: {listed or "none"}.'
        )
    return eos_id


def _content(token: Value) -> str | None:
    if isinstance(token.value, dict):
        token = token.entries().get("content", Value(None, where=token.where))
    return None if token.value is None else token.text()


def _add_special_tokens(backend: tokenizers.Tokenizer, *, config: dict[str, Value], eos_token: str | None) -> None:
    """Adds the special tokens that stand only in added_tokens_decoder, if they get the ids that it gives them.

    They are never encoded from text, so that the ids of a text do not change.
    """
    declared = config["added_tokens_decoder"].entries() if "added_tokens_decoder" in config else {}
    next_id = max(
        backend.get_vocab_size(with_added_tokens=False), 1 + max(backend.get_added_tokens_decoder(), default=-1)
    )
    added: list[tokenizers.AddedToken] = []
    for token_id, content in sorted(_special_tokens(declared, eos_token=eos_token).items()):
        is_new = backend.token_to_id(content) is None and backend.id_to_token(token_id) is None
        if is_new and token_id == next_id + len(added):
            added.append(tokenizers.AddedToken(content, special=True, normalized=False))
    backend.add_special_tokens(added)


def _special_tokens(declared: dict[str, Value], *, eos_token: str | None) -> dict[int, str]:
    """Returns the special tokens of added_tokens_decoder by id."""
    found: dict[int, str] = {}
    for key, entry in declared.items():
        content = _content(entry)
        is_special = entry.entries().get("special", Value(False, where=entry.where)).flag()
        if content and (is_special or content == eos_token):
            found[Value(int(key) if re.fullmatch("[0-9]{1,9}", key) else key, where=entry.where).integer()] = content
    return found
