"""Marks of tokens: which tokens of chats are targets, and where chats end.

A row holds the mark of each token above the 24 bits of its id, so that both take the same way from a store to a batch.
Tokens of text have none: all are targets, and the end-of-text token ends a document. In a chat, whose turns that token
may end, a mark does.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from torchtitan_clone.config.schema_training import Training
from torchtitan_clone.data.slices import Tokens, load_slices

ID_BITS = 24
"""Of an id; those of tokenizers are below 2**24."""
_MARK_BYTE = ID_BITS // 8 if sys.byteorder == "little" else 0
CHAT = 1
"""The token is one of a chat."""
TARGET = 2
"""It is a target."""
END = 4
"""It is the last of its chat."""


def ids_of(tokens: np.ndarray) -> np.ndarray:
    """Returns the ids of tokens without their marks."""
    return tokens & ((1 << ID_BITS) - 1) if tokens.dtype == np.uint32 else tokens


def marks_of(tokens: np.ndarray) -> np.ndarray | None:
    """Returns the marks of tokens, uint8; None if no token has one."""
    if tokens.dtype != np.uint32:
        return None
    has_marks = tokens.size and tokens.max() >> ID_BITS  # any() of the marks, which are strided, takes 8 times as long
    return np.ascontiguousarray(tokens.view(np.uint8)[..., _MARK_BYTE::4]) if has_marks else None


def no_targets(marks: np.ndarray) -> np.ndarray:
    """Returns for each mark whether its token is no target."""
    return marks & (CHAT | TARGET) == CHAT


def ends_of(tokens: np.ndarray, *, marks: np.ndarray | None, eos_id: int) -> np.ndarray:
    """Returns for each token whether it ends a document; `marks` are those of the tokens."""
    is_end = tokens == eos_id  # never with a mark
    return is_end if marks is None else is_end | (marks & END > 0)


def with_marks(ids: np.ndarray, *, marks: np.ndarray) -> np.ndarray:
    """Returns the ids with their marks, as uint32."""
    tokens = ids.astype(np.uint32)
    tokens.view(np.uint8)[_MARK_BYTE::4] = marks
    return tokens


class MarkedTokens:
    """The token ids of chats with their marks, as one array that is read in slices."""

    dtype = np.dtype(np.uint32)

    def __init__(self, ids: Tokens, *, marks: Tokens) -> None:
        self._ids = ids
        self._marks = marks

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, positions: slice) -> np.ndarray:
        return with_marks(self._ids[positions], marks=self._marks[positions])

    def load(self, bounds: Sequence[tuple[int, int]]) -> None:
        """Fetches slices at once, see load_slices()."""
        for numbers in (self._ids, self._marks):
            load_slices(numbers, bounds)


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A chat as text, not empty."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """First character, and the one after the last, of what is a target; not empty, in order."""
    content: bytes
    """Identifies the chat, which may have been rendered several times."""
    spelled: int
    """Special tokens that its messages spell out."""

    def __len__(self) -> int:
        return len(self.text)

    @property
    def to_encode(self) -> tuple[str, tuple[tuple[int, int], ...], int]:
        """What the tokenizer's process gets of it, which does not import this file."""
        return self.text, self.spans, self.spelled


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options of a source of chats, as those of [training]."""

    supervise: str
    supervise_thinking: bool
    supervise_tool_calls: bool
    long_chats: str

    @classmethod
    def of(cls, training: Training) -> "ChatOptions":
        """Returns those of a source."""
        return cls(
            supervise=training.supervise,
            supervise_thinking=training.supervise_thinking,
            supervise_tool_calls=training.supervise_tool_calls,
            long_chats=training.long_chats,
        )

    def describe(self) -> str:
        """Returns which tokens are targets, as the options say."""
        switches = ("supervise_thinking", "supervise_tool_calls")
        less = [f"{name} = false" for name in switches if not getattr(self, name)]
        return ", ".join([f'supervise = "{self.supervise}"', *less])


class RowRenderer(Protocol):
    """Makes texts of rows: chat.py has it, which is imported only where there are chats."""

    @property
    def identity(self) -> str:
        """Identifies what becomes of a row."""
        ...

    def render(self, row: object, /) -> list[Rendered]:
        """Returns the texts of a row; ValueError if it is no chat."""
        ...
