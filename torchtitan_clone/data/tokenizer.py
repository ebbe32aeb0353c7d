"""Tokenizers: any tokenizer.json in the Hugging Face format."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.overlay import toml_like

SHIPPED_FOLDER = Path(__file__).parent / "assets" / "stdlib_tokenizer"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
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
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, special tokens included."""
        return self.backend.decode(list(ids), skip_special_tokens=False)


def build_tokenizer(hf_assets_path: str | None) -> Tokenizer:
    """Reads tokenizer.json, and the end-of-text token from tokenizer_config.json, in a folder; None: the package's.

    ConfigError if a file is missing or invalid, or names no end-of-text token.
    """
    folder = SHIPPED_FOLDER if hf_assets_path is None else Path(hf_assets_path)
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise ConfigError(
            f"model.hf_assets_path = {toml_like(str(folder))}: the folder has no {TOKENIZER_FILE}; set it to a folder "
            "with the tokenizer of a Hugging Face model, or leave it unset for the tokenizer of this package."
        )
    content = path.read_bytes()
    try:
        backend = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:
        raise _invalid_file_error(path, kind="tokenizer", error=error) from error
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(
        backend=backend,
        vocab_size=1 + max(backend.get_vocab(with_added_tokens=True).values()),
        eos_id=_eos_id(backend, path=folder / CONFIG_FILE),
        fingerprint=hashlib.sha256(content).hexdigest(),
    )


def _invalid_file_error(path: Path, *, kind: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"model.hf_assets_path = {toml_like(str(path.parent))}: {path.name} is not a valid {kind} ({error}); correct "
        "the file, or download it again."
    )


def tokenizer_files(hf_assets_path: str | None) -> dict[str, bytes]:
    """Returns the tokenizer's files by name, to be saved with an exported model."""
    folder = SHIPPED_FOLDER if hf_assets_path is None else Path(hf_assets_path)
    found = {name: (folder / name).read_bytes() for name in _FILES if (folder / name).is_file()}
    # Without a class, transformers selects one by model type, and older versions then pre-tokenize differently.
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | json.loads(found.get(CONFIG_FILE, b"{}"))
    return found | {CONFIG_FILE: json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"}


def _eos_id(backend: tokenizers.Tokenizer, *, path: Path) -> int:
    """Returns the id of the eos_token, in the file a string, or an object with the string "content"."""
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise _invalid_file_error(path, kind="JSON file", error=error) from error
    token = config.get("eos_token") if isinstance(config, dict) else None
    token = token.get("content") if isinstance(token, dict) else token
    eos_id = None if token is None else backend.token_to_id(token)
    if eos_id is None:
        special = [added.content for added in backend.get_added_tokens_decoder().values() if added.special]
        found = "has no eos_token" if token is None else f"names the eos_token {token!r}, which has no id"
        raise ConfigError(
            f"model.hf_assets_path = {toml_like(str(path.parent))}: {path.name} {found}, but documents need a "
            f'separator; set "eos_token" in it to one of the special tokens: {", ".join(special[:20]) or "none"}.'
        )
    return eos_id
