"""Tokenizers: any tokenizer.json in the Hugging Face format."""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import tokenizers
from tokenizers import processors

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.downloads import describe_download, find_downloaded
from torchtitan_clone.config.messages import toml_like
from torchtitan_clone.config.started import as_started
from torchtitan_clone.documents import DocumentError, Value, find_member, is_unicode, parse_json, read_member, shorten

logger = logging.getLogger("torchtitan_clone")

SHIPPED_FOLDER = Path(__file__).parent / "assets" / "stdlib_tokenizer"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
MAX_ID = (1 << 24) - 1
_PANIC = "PanicException"
"""Class of the errors of Rust's `panic!`: a BaseException that cannot be imported."""
_FILES = (TOKENIZER_FILE, CONFIG_FILE, "special_tokens_map.json", "chat_template.jinja")
_UNKNOWN_BYTES = 4
"""Assumed for the unknown token where its text is not known: the most that a character has."""


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer, with the id of the end-of-text token, which follows every document."""

    backend: tokenizers.Tokenizer
    """Without a post-processor, whose part bos_id has."""
    vocab_size: int
    """Highest id + 1; ids may have gaps."""
    eos_id: int
    bos_id: int | None = None
    """The beginning-of-text token, which precedes every text; None: there is none."""
    prefix_id: int
    """The token that stands before a text of which the first token is scored too: the bos_token, else the eos_token."""
    pad_id: int | None = None
    """The pad_token of tokenizer_config.json, which exports name; nothing here is padded with it."""
    end_ids: tuple[int, ...]
    """What ends a generated text: eos_id, then others in generation_config.json, such as that of the end of a turn."""
    digest: str
    """Of tokenizer.json."""
    folder: Path
    """Of its files, among which the chat template may be."""
    is_as_stored: bool = True
    """Whether the files in the folder give the same ids: an id of eos_token, and whether bos_id is put before texts."""
    parse_special_tokens: bool = False
    """Whether special tokens that a text spells out become their ids instead of characters."""

    @property
    def fingerprint(self) -> str:
        """Identifies what becomes of a text; compared with that of token stores and checkpoints."""
        return self.digest if self.bos_id is None else f"{self.digest} bos {self.bos_id}"

    def is_made_of(self, content: bytes) -> bool:
        """Returns whether this tokenizer was read from a tokenizer.json of this content."""
        return hashlib.sha256(content).hexdigest() == self.digest

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.backend.encode_special_tokens = not self.parse_special_tokens  # the library does not pickle it

    def describe(self) -> str:
        """Returns its size and the tokens around each text, in one line."""
        start = "" if self.bos_id is None else f"{self.decode([self.bos_id])} ({self.bos_id}) before and "
        return f"{self.vocab_size:,} ids; {start}{self.decode([self.eos_id])} ({self.eos_id}) after each text"

    def encode_batch(self, texts: Sequence[str], *, add_bos: bool = True) -> list[list[int]]:
        """Returns the ids of each text, without eos_id."""
        with _explained_errors("it must encode any text"):
            encoded = [
                encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
            ]
        return encoded if self.bos_id is None or not add_bos else [[self.bos_id, *ids] for ids in encoded]

    def parsing_special_tokens(self, *, option: str = "training.parse_special_tokens = true") -> "Tokenizer":
        """Returns this tokenizer with parse_special_tokens, which `option` demands.

        ConfigError if the id of a special token is not in the vocabulary.
        """
        for token_id, token in self.backend.get_added_tokens_decoder().items():
            if token_id >= self.vocab_size:
                rule = f"its id {token_id} is not below the {self.vocab_size:,} of the vocabulary"
                rule = f"{shorten(repr(token.content))} stands in {CONFIG_FILE} alone, and {rule}"
                remedy = f"save the tokenizer with transformers, which adds it to {TOKENIZER_FILE}"
                raise ConfigError(f"{option}: {rule}; {remedy}.")
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        return replace(self, backend=backend, parse_special_tokens=True)

    def encode_alone(self, text: str) -> tokenizers.Encoding:
        """Returns the ids of a text, without bos_id and eos_id, and what else the library says of it."""
        with _explained_errors("it must encode any text"):
            return self.backend.encode(text, add_special_tokens=False)

    def encode_with_sizes(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Returns the ids of each text, and how many of its UTF-8 bytes each stands for; they add up to the text's.

        A token stands for what is from its start to that of the next one, so that characters that the tokenizer drops
        or replaces count too; bos_id for nothing.
        """
        with _explained_errors("it must encode any text"):
            encodings = self.backend.encode_batch(list(texts), add_special_tokens=False)
        start = [] if self.bos_id is None else [self.bos_id]
        encoded: list[tuple[list[int], list[int]]] = []
        for text, encoding in zip(texts, encodings, strict=True):
            starts = accumulate((first for first, _ in encoding.offsets[1:]), max, initial=0)
            places = [*starts, len(text)] if encoding.ids else []
            sizes = [len(text[first:last].encode()) for first, last in pairwise(places)]
            encoded.append(([*start, *encoding.ids], [0 for _ in start] + sizes))
        return encoded

    @property
    def is_byte_level(self) -> bool:
        """Whether every character of a token is one byte of the text, so that byte_lengths() is exact."""
        decoder = self.backend.decoder
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    def byte_lengths(self) -> list[int]:
        """Returns the bytes that each id adds to a text, 0 for special tokens and ids without a token.

        An estimate where the tokenizer drops or replaces characters. Where the text is known, encode_with_sizes() is
        exact, and token stores count its bytes.
        """
        added = self.backend.get_added_tokens_decoder()
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        lengths = [0] * max(self.vocab_size, 1 + max(added, default=0))  # tokenizer_config.json may add higher ids
        if self.is_byte_level:
            for token, token_id in vocabulary.items():
                lengths[token_id] = len(token.encode(errors="replace") if token_id in added else token)
        else:
            ids = sorted(set(vocabulary.values()))
            with _explained_errors("it must decode any id"):  # after itself: the first token of a text has no space
                once, twice = (self.backend.decode_batch([[each] * n for each in ids], False) for n in (1, 2))
            for token_id, one, two in zip(ids, once, twice, strict=True):
                is_byte = re.fullmatch("<0x[0-9A-F]{2}>", self.backend.id_to_token(token_id) or "")
                lengths[token_id] = 1 if is_byte else max(0, len(two.encode()) - len(one.encode()))
        for token_id in (each for each, token in added.items() if token.special):
            lengths[token_id] = 0
        lengths[self.eos_id] = 0
        if (unknown := self._unknown_id()) is not None:
            lengths[unknown] = _UNKNOWN_BYTES
        return lengths[: self.vocab_size]

    def _unknown_id(self) -> int | None:
        model = json.loads(self.backend.to_str())["model"]
        token = model.get("unk_token")
        return model.get("unk_id") if token is None else self.backend.token_to_id(token)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, special tokens included."""
        with _explained_errors("it must decode any id"):
            return self.backend.decode(list(ids), skip_special_tokens=False)


def _is_of_library(error: BaseException) -> bool:
    """Returns whether the library has raised it: its errors have no class of their own, and its panics are others."""
    return type(error) is Exception or type(error).__name__ == _PANIC


@contextmanager
def _explained_errors(rule: str) -> Iterator[None]:
    """Raises ConfigError for what the library raises."""
    try:
        yield
    except BaseException as error:
        if not _is_of_library(error):
            raise
        raise ConfigError(f"the tokenizer of model.hf_assets_path: {shorten(str(error))}; {rule}") from None


def build_tokenizer(hf_assets_path: str | None, *, add_bos: bool | None = None) -> Tokenizer:
    """Reads tokenizer.json, and the end-of-text token from tokenizer_config.json, in a folder; None: the package's.

    `add_bos` is data.add_bos. Adds the special tokens that only tokenizer_config.json has. ConfigError if a file is
    missing or invalid, or names no end-of-text token.
    """
    folder = find_downloaded(hf_assets_path or SHIPPED_FOLDER, repository="tokenizer")
    option = f"model.hf_assets_path = {toml_like(hf_assets_path or str(folder))}"
    try:
        content = read_member(folder, name=TOKENIZER_FILE)
        if content is None:
            if not folder.is_dir():
                hint = describe_download(str(folder), repository="tokenizer")
                raise ConfigError(f"{option}: there is no such folder; set it to that of a tokenizer{hint}.")
            raise ConfigError(f"{option}: the folder has no {TOKENIZER_FILE}; {_describe_remedy(folder)}.")
        for name in _FILES:  # an export saves them all
            find_member(folder, name=name)
        backend = _parse_tokenizer(content)
        config = _read_config(folder)
        highest = max(backend.get_vocab(with_added_tokens=True).values())
        eos_id, is_new = _eos_id(backend, config=config, option=option)
        post_processor, backend.post_processor = backend.post_processor, None
        stored = _start_of_texts(backend, post_processor=post_processor, eos_id=eos_id, add_bos=add_bos)
        named = _named_id(backend, config=config, name="bos_token")
        bos_id = _bos_id(config, stored=stored, named=named, add_bos=add_bos)
        vocab_size = 1 + max(highest, eos_id, -1 if bos_id is None else bos_id)
        pad_id = _named_id(backend, config=config, name="pad_token")
        end_ids = dict.fromkeys([eos_id, *(token_id for token_id in _generation_ends(folder) if token_id < vocab_size)])
    except (DocumentError, OSError) as error:
        raise ConfigError(f"{option}: {error}; correct the file, or download it again.") from error
    return Tokenizer(
        backend=backend,
        vocab_size=vocab_size,
        eos_id=eos_id,
        bos_id=bos_id,
        prefix_id=next(each for each in (bos_id, named, eos_id) if each is not None),
        pad_id=pad_id if pad_id is not None and pad_id < vocab_size else None,
        end_ids=tuple(end_ids),
        digest=hashlib.sha256(content).hexdigest(),
        folder=folder,
        is_as_stored=not is_new and bos_id == stored and (add_bos is None or "add_bos_token" not in config),
    )


def _describe_remedy(folder: Path) -> str:
    """Returns what to do about a folder without a tokenizer.json."""
    if models := sorted(folder.glob("*.model")):
        command = as_started("python scripts/convert_tokenizer.py")
        return f"convert {models[0].name}, if it is of SentencePiece, with `{command} {models[0]} {folder}`"
    remedy = "set it to a folder with the tokenizer of a Hugging Face model"
    return f"{remedy}, or leave it unset for the tokenizer of this package"


def _parse_tokenizer(content: bytes) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(content.decode())
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise DocumentError(f"{TOKENIZER_FILE} is not a valid tokenizer ({shorten(str(error))})") from error
    if any(getattr(backend.model, name, None) for name in ("dropout", "alpha")):
        rule = "its model draws the ids of a text at random (dropout or alpha), and a run could not be resumed"
        raise DocumentError(f"{TOKENIZER_FILE}: {rule}; set them to null")
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    ids = backend.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise DocumentError(f"{TOKENIZER_FILE} has an empty vocabulary")
    if max(ids) > MAX_ID:  # the library takes minutes to write such a vocabulary
        raise DocumentError(f"{TOKENIZER_FILE} has a token with id {max(ids)}; at most {MAX_ID} is accepted")
    return backend


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Returns the files of a run's tokenizer by name, to be saved with an exported model: they give the ids trained.

    DocumentError if a file is invalid, OSError if tokenizer.json is that of another tokenizer.
    """
    folder = tokenizer.folder
    contents = {name: read_member(folder, name=name) for name in _FILES}
    files = {name: content for name, content in contents.items() if content is not None}
    if not tokenizer.is_made_of(files.get(TOKENIZER_FILE, b"")):
        rule = f"{TOKENIZER_FILE} is not there, or not the one that was read at the start; put it back"
        raise OSError(f"model.hf_assets_path = {toml_like(str(folder))}: {rule}")
    # Another class, also that of the model type, may rebuild the pre-tokenizer that tokenizer.json has.
    config = {name: entry.value for name, entry in _read_config(folder).items() if name != "auto_map"}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if not tokenizer.is_as_stored:
        files[TOKENIZER_FILE] = _with_ends(tokenizer).to_str(pretty=True).encode() + b"\n"
        # tokenizer.json has all tokens that have an id. To others transformers would give ids that the model lacks.
        unknown = [name for name, value in config.items() if name.endswith("_token") and not _has_id(value, tokenizer)]
        config = {name: value for name, value in config.items() if name not in ("added_tokens_decoder", *unknown)}
        config["add_bos_token"] = tokenizer.bos_id is not None
        if tokenizer.bos_id is not None:
            config["bos_token"] = tokenizer.backend.id_to_token(tokenizer.bos_id)
        files.pop("special_tokens_map.json", None)
    return files | {CONFIG_FILE: json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"}


def _has_id(entry: object, tokenizer: Tokenizer) -> bool:
    token = entry.get("content") if isinstance(entry, dict) else entry
    return isinstance(token, str) and tokenizer.backend.token_to_id(token) is not None


def _with_ends(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Returns the tokenizer with a post-processor that puts bos_id before each text."""
    content = json.loads(tokenizer.backend.to_str())
    if tokenizer.bos_id is not None:
        token = tokenizer.backend.id_to_token(tokenizer.bos_id)
        start = {"SpecialToken": {"id": token, "type_id": 0}}
        first, second = ({"Sequence": {"id": name, "type_id": index}} for index, name in enumerate("AB"))
        content["post_processor"] = {  # not processors.TemplateProcessing, to which a colon in a token is a type
            "type": "TemplateProcessing",
            "single": [start, first],
            "pair": [start, first, start, second],
            "special_tokens": {token: {"id": token, "ids": [tokenizer.bos_id], "tokens": [token]}},
        }
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def _read_config(folder: Path) -> dict[str, Value]:
    content = read_member(folder, name=CONFIG_FILE)
    config = parse_json(b"{}" if content is None else content, where=CONFIG_FILE).entries()
    for name, entry in config.items():
        if not is_unicode(json.dumps([name, entry.value], ensure_ascii=False)):
            entry.refuse("must be valid Unicode, without halves of surrogate pairs")
    return config


def _generation_ends(folder: Path) -> list[int]:
    """Returns eos_token_id of generation_config.json, which is one id, several, or null."""
    content = read_member(folder, name=GENERATION_FILE)
    entries = {} if content is None else parse_json(content, where=GENERATION_FILE).entries()
    found = entries.get("eos_token_id", Value(None, where=GENERATION_FILE))
    if isinstance(found.value, list):
        return found.integers()
    return [] if found.value is None else [found.integer()]


def _named_id(backend: tokenizers.Tokenizer, *, config: dict[str, Value], name: str) -> int | None:
    """Returns the id of a token such as the bos_token, in the file a string, or an object with the string "content"."""
    token = _content(config[name]) if name in config else None
    return None if token is None else backend.token_to_id(token)


def _eos_id(backend: tokenizers.Tokenizer, *, config: dict[str, Value], option: str) -> tuple[int, bool]:
    """Returns the id of the eos_token, and whether it had none, so that it was given the next free one."""
    token = _content(config["eos_token"]) if "eos_token" in config else None
    _add_special_tokens(backend, config=config, eos_token=token)
    if not token:
        special = [added.content for added in backend.get_added_tokens_decoder().values() if added.special]
        listed = ", ".join(shorten(each) for each in special[:20])
        raise ConfigError(
            f"{option}: {CONFIG_FILE} has no eos_token, but documents need a separator; set "
            f'"eos_token" in it to one of the special tokens: {listed or "none"}.'
        )
    if (eos_id := backend.token_to_id(token)) is not None:
        return eos_id, False
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False)])
    eos_id = backend.token_to_id(token)
    assert eos_id is not None
    rule = f"the eos_token {shorten(repr(token))} of {CONFIG_FILE} has no id in {TOKENIZER_FILE}"
    logger.warning("%s: %s; it gets the next free one, %d", option, rule, eos_id)
    return eos_id, True


def _start_of_texts(
    backend: tokenizers.Tokenizer, *, post_processor: processors.PostProcessor | None, eos_id: int, add_bos: bool | None
) -> int | None:
    """Returns the token that the post-processor puts before each text; DocumentError if it changes texts otherwise."""
    encoding = _any_encoding(backend)
    if post_processor is None or encoding is None:
        return None
    ids: list[int] = encoding.ids
    with _explained_errors("its post-processor must accept any text"):
        processed: list[int] = post_processor.process(encoding, None, True).ids
    starts = [index for index in range(len(processed)) if processed[index : index + len(ids)] == ids]
    if starts and starts[0] <= 1 and processed[starts[0] + len(ids) :] in ([], [eos_id]):
        return processed[0] if starts[0] else None
    if add_bos is False and starts:
        return processed[0]
    rule = f"its post-processor turns the ids {ids} of a text into {processed[:20]}"
    allowed = "at most one token may precede them, and the eos_token follow"
    remedy = "; with data.add_bos = false nothing is put around texts" if starts else ""
    raise DocumentError(f"{TOKENIZER_FILE}: {rule}; {allowed}{remedy}")


def _any_encoding(backend: tokenizers.Tokenizer) -> tokenizers.Encoding | None:
    """Returns the encoding of some text that has tokens; None if none was found."""
    for text in ("a", *sorted(backend.get_vocab(with_added_tokens=False))[:1000]):
        try:
            encoding = backend.encode(text, add_special_tokens=False)
        except BaseException as error:
            if not _is_of_library(error):
                raise
            continue
        if encoding.ids:
            return encoding
    return None


def _bos_id(config: dict[str, Value], *, stored: int | None, named: int | None, add_bos: bool | None) -> int | None:
    """Returns the token before each text: as the option says, else the files, of which the flag decides."""
    if add_bos is None and "add_bos_token" in config and config["add_bos_token"].value is not None:
        add_bos = config["add_bos_token"].flag() and named is not None  # as transformers reads it
        stored = named
    if add_bos is None:
        return stored
    if add_bos and stored is None and named is None:
        raise ConfigError(
            f"data.add_bos = true: {CONFIG_FILE} of model.hf_assets_path names no bos_token that has an id; "
            'set "bos_token" in it to one of the special tokens, or data.add_bos to false.'
        )
    return (named if stored is None else stored) if add_bos else None


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
    special: dict[int, str] = {}
    for key, entry in declared.items():
        content = _content(entry)
        is_special = entry.entries().get("special", Value(False, where=entry.where)).flag()
        if content and (is_special or content == eos_token):
            special[Value(int(key) if re.fullmatch("[0-9]{1,9}", key) else key, where=entry.where).integer()] = content
    return special
