"""Text to token ids and back, by any tokenizer.json of the Hugging Face format."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from torchtitan_clone.config import ConfigError

SHIPPED_FOLDER = Path(__file__).parent / "assets" / "stdlib_tokenizer"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
_FILES = (TOKENIZER_FILE, CONFIG_FILE, "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer with an id that separates documents."""

    backend: tokenizers.Tokenizer
    vocab_size: int
    """One more than the highest id: ids may have gaps."""
    eos_id: int
    """Follows every document."""
    fingerprint: str
    """sha256 of tokenizer.json."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle; the library forgets this one setting."""
        self.__dict__.update(state)
        self.backend.encode_special_tokens = True

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without eos_id; the name of a special token within a text is ordinary text."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return self.backend.decode(list(ids), skip_special_tokens=False)


def build_tokenizer(hf_assets_path: str | None) -> Tokenizer:
    """Reads tokenizer.json and the end-of-text token that tokenizer_config.json beside it names.

    ConfigError where a file is missing or broken, or no end-of-text token can be determined.
    """
    folder = SHIPPED_FOLDER if hf_assets_path is None else Path(hf_assets_path)
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise ConfigError(f"model.hf_assets_path = {str(folder)!r}: there is no {TOKENIZER_FILE} in it")
    content = path.read_bytes()
    backend = _parse(content, path=path)
    return Tokenizer(
        backend=backend,
        vocab_size=1 + max(backend.get_vocab(with_added_tokens=True).values()),
        eos_id=_eos_id(backend, folder=folder),
        fingerprint=hashlib.sha256(content).hexdigest(),
    )


def tokenizer_files(hf_assets_path: str | None) -> dict[str, bytes]:
    """The files of the tokenizer by name, so that others can load it beside a model."""
    folder = SHIPPED_FOLDER if hf_assets_path is None else Path(hf_assets_path)
    found = {name: (folder / name).read_bytes() for name in _FILES if (folder / name).is_file()}
    # Without this, transformers chooses a class by the model, and older ones then split words in another way.
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | json.loads(found.get(CONFIG_FILE, b"{}"))
    return found | {CONFIG_FILE: json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"}


def _parse(content: bytes, *, path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:
        raise ConfigError(f"model.hf_assets_path: {path} is no tokenizer ({error})") from error
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    return backend


def _eos_id(backend: tokenizers.Tokenizer, *, folder: Path) -> int:
    token = _eos_token(folder / CONFIG_FILE)
    eos_id = None if token is None else backend.token_to_id(token)
    if eos_id is None:
        special = [added.content for added in backend.get_added_tokens_decoder().values() if added.special]
        found = "names no eos_token" if token is None else f"names eos_token {token!r}, which has no id"
        raise ConfigError(
            f"model.hf_assets_path = {str(folder)!r}: {CONFIG_FILE} {found}, and documents need a separator; "
            f'write {{"eos_token": "..."}} into it with one of the special tokens: {", ".join(special[:20]) or "none"}'
        )
    return eos_id


def _eos_token(path: Path) -> str | None:
    """The eos_token of a tokenizer_config.json: a string, or an object with the string as content."""
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model.hf_assets_path: {path} is not JSON ({error})") from error
    token = config.get("eos_token") if isinstance(config, dict) else None
    return token.get("content") if isinstance(token, dict) else token
