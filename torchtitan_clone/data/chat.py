"""Renders chats with the chat template of a tokenizer, and finds what of their text the assistant wrote.

transformers renders, in its sandbox; it is imported with the first chat.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import toml_like
from torchtitan_clone.data.kinds import LINE_BYTES, decompressed, kind_of
from torchtitan_clone.data.marks import ChatOptions, Rendered, RowRenderer
from torchtitan_clone.data.sources import (
    BadRows,
    Source,
    checked_size,
    json_type,
    read_files,
    read_lines,
    read_parquet,
    read_rows,
    row_of_line,
)
from torchtitan_clone.data.token_store import digest_of
from torchtitan_clone.data.tokenizer import CONFIG_FILE, Tokenizer
from torchtitan_clone.documents import DocumentError, Value, parse_json, read_member, shorten

if TYPE_CHECKING:
    import pyarrow

Message = Mapping[str, Any]
Span = tuple[int, int]
"""First character, and the one after the last."""
TEMPLATE_FILE = "chat_template.jinja"
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment")
"""Whose messages a row may hold; "assistant" is the model."""
COLUMNS = ("messages", "prompt", "completion", "tools")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message, and types of the parts of its content, that hold what the model thinks."""
_THOUGHT = re.compile(r"\s*<think>.*?</think>", re.DOTALL)
"""The same at the start of a content that is a string."""
_FIXED_DATE = {"%d": "26", "%b": "Jul", "%B": "July", "%m": "07", "%Y": "2024", "%y": "24", "%A": "Friday"}
"""Today, in templates that print it: what a store holds must not depend on the day. The default of Llama 3's."""
_MAX_TEMPLATE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Renderer:
    """A chat template, the tokens that it may name, and which turns are targets: `supervise` of the options.

    A template that marks turns with {% generation %} says itself what is a target. Otherwise a turn is what follows the
    rendering of the messages before it with add_generation_prompt, to the end-of-turn token.
    """

    template: str
    named_tokens: Mapping[str, str]
    ends: tuple[str, ...]
    """Tokens that may end a turn: the text that follows them is none of it if it is white space."""
    special: tuple[str, ...]
    """Special tokens as they are in JSON, to count those in messages."""
    supervise: str
    thinking: bool = True
    """Whether what the model thinks in its turns is a target: supervise_thinking of the options."""
    tool_calls: bool = True
    """Whether its calls of tools are: supervise_tool_calls."""

    @property
    def identity(self) -> str:
        """Identifies what becomes of a row."""
        switches = [name for name in ("thinking", "tool_calls") if not getattr(self, name)]
        parts = [self.template, dict(self.named_tokens), self.ends, self.supervise, _FIXED_DATE]
        return digest_of([*parts, *([{"less": switches}] if switches else [])])

    def render(self, row: object) -> list[Rendered]:
        """Returns the texts of a row with the characters that are targets; none if the row has no turn to train on.

        One text for each turn if the template renders a turn in another way after later ones are added: Qwen3's drops
        the thinking of earlier ones. ValueError if the row is no chat, or if the template refuses it.
        """
        messages, first, tools = read_chat(row)
        turns = [place for place, each in enumerate(messages) if each["role"] == "assistant" and place >= first]
        if not turns and self.supervise != "all":
            return []
        content = json.dumps([messages, tools])
        found = [(text, tuple(spans)) for text, spans in self._targets(messages, turns, tools=tools) if spans]
        spelled = [sum(map(content.count, self.special)), *(0 for _ in found)]  # of each chat once
        return [
            Rendered(text=text, spans=spans, content=content.encode(), spelled=count)
            for (text, spans), count in zip(found, spelled, strict=False)
        ]

    def _targets(
        self, messages: list[Message], turns: list[int], *, tools: list[Any] | None
    ) -> list[tuple[str, list[Span]]]:
        chosen = turns[-1:] if self.supervise == "last" else turns
        whole, marked = self._render(messages, tools=tools)
        if self.supervise == "all":
            spans = [(0, len(whole))]
            return [(whole, self._reduced(spans, whole, messages=messages, turns=turns, tools=tools))]
        if self._marks_turns:
            is_first = not any(each["role"] == "assistant" for each in messages[: chosen[0]])
            before = [] if is_first else self._render(messages[: chosen[0]], tools=tools)[1]
            spans = [(start, end) for start, end in marked[len(before) :] if start < end]
            return [(whole, self._reduced(spans, whole, messages=messages, turns=chosen, tools=tools))]
        texts = {len(messages): whole}  # what is rendered already
        samples = [self._turn(messages[: turn + 1], text=texts.get(turn + 1), tools=tools) for turn in chosen]
        if all(whole.startswith(text[:end]) for text, (_, end) in samples):
            spans = [span for _, span in samples]
            return [(whole, self._reduced(spans, whole, messages=messages, turns=chosen, tools=tools))]
        return [
            (text, self._reduced([span], text, messages=messages[: turn + 1], turns=[turn], tools=tools))
            for turn, (text, span) in zip(chosen, samples, strict=True)
        ]

    def _reduced(
        self, spans: list[Span], text: str, *, messages: list[Message], turns: list[int], tools: list[Any] | None
    ) -> list[Span]:
        """Returns spans of a text less what some turns have more than without their thoughts, or their calls of tools.

        A tag that the template writes in both cases remains a target.
        """
        switched_off = [
            remove
            for remove, is_on in ((_without_thinking, self.thinking), (_without_calls, self.tool_calls))
            if not is_on
        ]
        for turn in turns:
            for remove in switched_off:
                if (changed := remove(messages[turn])) != messages[turn]:
                    other, _ = self._render([*messages[:turn], changed, *messages[turn + 1 :]], tools=tools)
                    spans = _subtract(spans, self._difference(text, other))
        return spans

    def _difference(self, text: str, other: str) -> Span:
        """Returns what a text has between what it begins and ends with as the other one; special tokens are whole.

        Where it could be one token further to the left, it is, as with a channel of thoughts before that of the answer.
        """
        pieces, others = self._atoms.split(text), self._atoms.split(other)
        start = _common_length(pieces, others)
        backwards, others_backwards = ([piece[::-1] for piece in reversed(each)] for each in (pieces, others))
        end = len(text) - min(_common_length(backwards, others_backwards), min(len(text), len(other)) - start)
        while end > start and (token := next((t for t in self.ends if _ends_both(text, t, start, end)), None)):
            start, end = start - len(token), end - len(token)
        return start, end

    @cached_property
    def _atoms(self) -> re.Pattern[str]:
        """Matches special tokens; a text is divided into what is between them, and them."""
        longest_first = sorted(self.ends, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def _turn(self, messages: list[Message], *, text: str | None, tools: list[Any] | None) -> tuple[str, Span]:
        """Returns the text of messages, which may be known, and where in it is what the model writes of the last."""
        text = self._render(messages, tools=tools)[0] if text is None else text
        prompt, _ = self._render(messages[:-1], tools=tools, add_generation_prompt=True)
        start = len(prompt)
        if not text.startswith(prompt):  # as where the prompt opens a thought that the turn lacks
            start = len(os.path.commonprefix([prompt, text]))  # noqa: RUF071, of characters
            before, _ = self._render(messages[:-1], tools=tools)
            if not text.startswith(before):
                rule = "the chat template renders the messages before it in another way than without it"
                raise ValueError(f"message {len(messages)}: {rule}; mark turns in it with {{% generation %}}")
        written = text.rstrip()
        return text, (start, len(written) if written.endswith(self.ends) else len(text))

    @cached_property
    def _marks_turns(self) -> bool:
        return bool(_GENERATION.search(self.template))

    def _render(
        self, messages: list[Message], *, tools: list[Any] | None, add_generation_prompt: bool = False
    ) -> tuple[str, list[Span]]:
        try:
            (text,), spans = self._function(
                conversations=[messages], tools=tools, chat_template=self._dated, **self.named_tokens,
                return_assistant_tokens_mask=self._marks_turns, add_generation_prompt=add_generation_prompt,
            )  # fmt: skip
        except Exception as error:  # a template may raise anything
            raise ValueError(f"the chat template fails: {shorten(str(error))}") from error
        return text, spans[0] if spans else []

    @cached_property
    def _function(self) -> Callable[..., tuple[list[str], list[list[Span]]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        return cast("Callable[..., tuple[list[str], list[list[Span]]]]", render_jinja_template)

    @cached_property
    def _dated(self) -> str:
        """The template with a date of its own: the function of transformers returns today's."""
        if "strftime_now" not in self.template:
            return self.template
        fixed = "".join(f" | replace({code!r}, {value!r})" for code, value in _FIXED_DATE.items())
        return f"{{%- macro strftime_now(format) -%}}{{{{ format{fixed} }}}}{{%- endmacro +%}}{self.template}"


def _without_thinking(message: Message) -> Message:
    changed = {key: value for key, value in message.items() if key not in _THINKING_KEYS}
    content = changed.get("content")
    if isinstance(content, str) and (thought := _THOUGHT.match(content)):
        changed["content"] = content[thought.end() :]
    elif isinstance(content, list):
        changed["content"] = [
            part for part in content if not (isinstance(part, dict) and part.get("type") in _THINKING_KEYS)
        ]
    return changed


def _without_calls(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    return {"content": "", **{key: value for key, value in message.items() if key != "tool_calls"}}


def _ends_both(text: str, token: str, first: int, second: int) -> bool:
    """Returns whether a token ends at both of these characters of a text."""
    return text.endswith(token, 0, first) and text.endswith(token, 0, second)


def _common_length(pieces: list[str], others: list[str]) -> int:
    """Returns how many characters two divided texts begin with in common; every second piece is not divided."""
    length = 0
    for place, (piece, other) in enumerate(zip(pieces, others, strict=False)):
        if piece != other:
            return length + (0 if place % 2 else len(os.path.commonprefix([piece, other])))  # noqa: RUF071
        length += len(piece)
    return length


def _subtract(spans: list[Span], removed: Span) -> list[Span]:
    """Returns spans without the characters of another one."""
    parts = [part for start, end in spans for part in ((start, min(end, removed[0])), (max(start, removed[1]), end))]
    return [(start, end) for start, end in parts if start < end]


def renderer_of(options: ChatOptions, *, tokenizer: Tokenizer) -> Renderer:
    """Returns the renderer that the options of a source ask for; ConfigError as build_renderer()."""
    switches = {"thinking": options.supervise_thinking, "tool_calls": options.supervise_tool_calls}
    return build_renderer(tokenizer, supervise=options.supervise, **switches)


def build_renderer(tokenizer: Tokenizer, *, supervise: str, thinking: bool = True, tool_calls: bool = True) -> Renderer:
    """Returns the renderer of a tokenizer's chat template; ConfigError if its folder has none."""
    option = f"model.hf_assets_path = {toml_like(str(tokenizer.folder))}"
    try:
        config = parse_json(read_member(tokenizer.folder, name=CONFIG_FILE) or b"{}", where=CONFIG_FILE).entries()
        stored = read_member(tokenizer.folder, name=TEMPLATE_FILE)
        template = _template_of(config) if stored is None else stored.decode()
        named = {name: token for name in _NAMED_TOKENS if (token := _token_of(config.get(name)))}
    except (DocumentError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: {error}; correct the file, or download it again.") from error
    if not template:
        rule = f"chats are rendered by the tokenizer's chat template, and it has none in {CONFIG_FILE}"
        remedy = f"save one as {TEMPLATE_FILE} in that folder, or set the option to a tokenizer that has one"
        raise ConfigError(f"{option}: {rule}; {remedy}.")
    added = sorted(tokenizer.backend.get_added_tokens_decoder().values(), key=lambda token: token.content)
    ends = tuple(token.content for token in added if token.content.strip())
    special = tuple(json.dumps(token.content)[1:-1] for token in added if token.special)
    switches = {"supervise": supervise, "thinking": thinking, "tool_calls": tool_calls}
    return Renderer(template=template, named_tokens=named, ends=ends, special=special, **switches)


def with_end_of_turn(tokenizer: Tokenizer) -> Tokenizer:
    """Returns the tokenizer, in whose end_ids is the token that ends a turn of the assistant in its chat template."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        renderer = build_renderer(tokenizer, supervise="last")
        found = renderer.render({"messages": turns})
    except (ConfigError, ValueError):  # it has no template, or one for chats of another shape
        return tokenizer
    last = max((end for each in found for _, end in each.spans), default=0)
    ends = [token for token in renderer.ends if found and found[-1].text[:last].rstrip().endswith(token)]
    ids = [token_id for token in ends if (token_id := tokenizer.backend.token_to_id(token)) is not None]
    return replace(tokenizer, end_ids=tuple(dict.fromkeys([*tokenizer.end_ids, *ids[:1]])))


def _template_of(config: Mapping[str, Value]) -> str | None:
    """Returns the template in tokenizer_config.json, of several the default one."""
    value = config.get("chat_template")
    if value is not None and isinstance(value.value, list):
        named = [each.entries() for each in value.items()]
        value = next(
            (each.get("template") for each in named if "name" in each and each["name"].value == "default"), None
        )
    return None if value is None or value.value is None else value.text(max_chars=_MAX_TEMPLATE)


def _token_of(value: Value | None) -> str | None:
    if value is not None and isinstance(value.value, dict):
        value = value.entries().get("content")
    return None if value is None or value.value is None else value.text()


def read_chat(row: object) -> tuple[list[Message], int, list[Any] | None]:
    """Returns the messages of a row, the first that may be a target, and its tools; ValueError if it is no chat.

    The row has "messages", or "prompt" and "completion", which are lists of messages or the texts of a user and of the
    assistant; an answer in a prompt is no target.
    """
    if not isinstance(row, dict):
        raise ValueError(f"not a JSON object but {json_type(row)}")
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"'tools' holds {json_type(tools)}, not a list")
    if row.get("messages") is not None:
        parts = [row["messages"]]
    elif "prompt" in row and "completion" in row:
        roles = {"prompt": "user", "completion": "assistant"}
        parts = [
            [{"role": role, "content": row[key]}] if isinstance(row[key], str) else row[key]
            for key, role in roles.items()
        ]
    else:
        keys = shorten(", ".join(map(repr, row))) or "no keys"
        raise ValueError(f"neither the key 'messages' nor 'prompt' and 'completion' among {keys}")
    if not all(isinstance(part, list) for part in parts):
        raise ValueError("messages must be a list of objects with role and content")
    messages = [_checked(each, number=number) for number, each in enumerate(chain(*parts), start=1)]
    return messages, len(parts[0]) if len(parts) == 2 else 0, tools or None


def _checked(message: object, *, number: int) -> Message:
    """Returns a message without the keys that are null, as transformers renders it."""
    place = f"message {number}"
    if not isinstance(message, dict):
        raise ValueError(f"{place} is {json_type(message)}, not an object with role and content")
    present = {key: value for key, value in message.items() if value is not None}
    role = present.get("role")
    if role not in ROLES:
        described = "has no role" if role is None else f"has the unknown role {shorten(repr(role))}"
        raise ValueError(f"{place} {described}; known: {', '.join(ROLES)}")
    if "content" not in present and "tool_calls" not in present:
        raise ValueError(f"{place}, of the {role}, has no content")
    if not isinstance(present.get("content", ""), str | list):
        raise ValueError(f"the content of {place} is {json_type(present['content'])}, not a string")
    return present


def _parquet_rows(file: Path) -> "Iterator[pyarrow.StructScalar]":
    def columns_of(schema: "pyarrow.Schema") -> list[str]:
        return [name for name in COLUMNS if name in schema.names]

    batches = read_parquet(file, columns_of=columns_of)
    return chain.from_iterable(batch.to_struct_array() for batch in batches)


def without_nulls(value: Any) -> Any:
    """Returns a value without the fields that other rows of the column have."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def render_row(row: object, *, renderer: RowRenderer) -> list[Rendered]:
    """Returns the texts of a row; ValueError if it is no chat, or if one is too long to be tokenized."""
    rendered = renderer.render(row)
    for each in rendered:
        checked_size(each.text.encode())
    return rendered


def read_chats(source: Source, *, bad_rows: BadRows) -> Iterator[tuple[Rendered, int]]:
    """Yields every chat that has targets, with the number of bytes of the source read so far."""
    renderer = source.renderer
    assert renderer is not None

    def render(row: "bytes | pyarrow.StructScalar") -> list[Rendered]:
        if isinstance(row, bytes) and not row.strip():
            return []
        value = row_of_line(row) if isinstance(row, bytes) else without_nulls(row.as_py())
        rendered = render_row(value, renderer=renderer)
        bad_rows.without_targets += not rendered
        return rendered

    def read(raw: BinaryIO, *, file: Path) -> Iterator[Rendered]:
        kind = kind_of(file, text_key=source.text_key)
        rows: Iterator[bytes | pyarrow.StructScalar] = _parquet_rows(file)
        if kind.content != "parquet":
            rows = read_lines(decompressed(raw, compression=kind.compression), max_bytes=LINE_BYTES)
        return chain.from_iterable(read_rows(rows, text_of=render, file=file, bad_rows=bad_rows))

    return read_files(source, read=read)
