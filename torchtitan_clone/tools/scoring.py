"""Log-likelihoods of texts: packs them into rows as documents, which do not see one another.

Each scored token is in the group of its text: the sums of the loss by group then are those by text, on every mesh.
Legend: R rows, B rows of a batch, T tokens of a row, N tokens of all rows of a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchtitan_clone.data.packing import Batch
from torchtitan_clone.ops import IGNORE_INDEX
from torchtitan_clone.ops.source_sums import SourceSums


@dataclass(frozen=True, kw_only=True)
class ScoredText:
    """Tokens, of which those from index `first`, at least 1, are scored given all tokens before them."""

    tokens: Sequence[int]
    first: int

    @property
    def size(self) -> int:
        """Tokens that the text takes in a row: the last one is only a target."""
        return len(self.tokens) - 1

    @property
    def num_scored(self) -> int:
        return len(self.tokens) - self.first


def cut_text(ids: Sequence[int], *, seq_len: int) -> list[ScoredText]:
    """Returns stretches that score each token but the first once, given as many of the tokens before it as fit.

    They are those of lm-evaluation-harness: the last one, which scores fewer tokens, begins earlier.
    """
    ends = [min(start + seq_len, len(ids)) for start in range(1, len(ids), seq_len)]
    starts = [max(0, end - seq_len - 1) for end in ends]
    scored = range(1, len(ids), seq_len)
    return [
        ScoredText(tokens=ids[start:end], first=first - start)
        for start, end, first in zip(starts, ends, scored, strict=True)
    ]


def pack_texts(texts: Sequence[ScoredText], *, seq_len: int, multiple: int = 1) -> Batch:
    """Returns the rows of all texts, as many as a multiple, the last ones empty; a pure function of its arguments.

    Each text is in the first row that has room, among the last few.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for number, text in enumerate(texts):
        assert text.size <= seq_len
        found = next((row for row in range(max(0, len(rows) - 16), len(rows)) if room[row] >= text.size), None)
        if found is None:
            found = len(rows)
            rows.append([])
            room.append(seq_len)
        rows[found].append(number)
        room[found] -= text.size
    rows += [[] for _ in range(-len(rows) % multiple)]
    shape = (len(rows), seq_len)
    tokens_RT, positions_RT, documents_RT = (np.zeros(shape, dtype=kind) for kind in (np.int64, np.int64, np.int32))
    targets_RT, groups_RT = np.full(shape, IGNORE_INDEX, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for row, numbers in enumerate(rows):
        start = 0
        for document, number in enumerate(numbers):
            text = texts[number]
            here = slice(start, start + text.size)
            tokens_RT[row, here] = text.tokens[:-1]
            positions_RT[row, here] = np.arange(text.size)
            documents_RT[row, here] = document
            targets_RT[row, start + text.first - 1 : here.stop] = text.tokens[text.first :]
            groups_RT[row, here] = number
            start = here.stop
        documents_RT[row, start:] = len(numbers)
        positions_RT[row, start:] = np.arange(seq_len - start)
    return Batch(
        tokens_BT=torch.from_numpy(tokens_RT),
        targets_BT=torch.from_numpy(targets_RT),
        positions_BT=torch.from_numpy(positions_RT),
        documents_BT=torch.from_numpy(documents_RT),
        num_targets=int((targets_RT != IGNORE_INDEX).sum()),
        groups_BT=torch.from_numpy(groups_RT),
    )


def text_sums(count: int, *, vocab_size: int, device: torch.device) -> SourceSums:
    """Returns sums of the loss for each of so many texts."""
    sizes = torch.zeros(vocab_size, dtype=torch.int32)
    return SourceSums([str(number) for number in range(count)], bytes_V=sizes, device=device)


def log_likelihoods(sums: SourceSums, totals: Sequence[float]) -> list[float]:
    """Returns the log-likelihood of each text in nats, given the sums of own() over all ranks."""
    return [-loss for loss, *_ in sums.by_source(totals).values()]


class Scores:
    """A loss function that sums, for each text, log-likelihoods, and the tokens that are not the most likely ones."""

    def __init__(self, count: int, *, device: torch.device) -> None:
        self.nats = torch.zeros(count, device=device)
        self.misses = torch.zeros(count, device=device)

    def __call__(self, hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, texts_BT: Tensor) -> Tensor:
        targets_N, texts_N = targets_BT.flatten(), texts_BT.flatten()
        for index in (targets_N != IGNORE_INDEX).nonzero()[:, 0].split(1024):
            logits = (hidden_BTD.flatten(0, 1)[index] @ weight_VD.T).float()
            targets, texts = targets_N[index], texts_N[index]
            self.nats.index_add_(0, texts, logits.log_softmax(dim=-1).gather(1, targets[:, None])[:, 0])
            self.misses.index_add_(0, texts, (logits.argmax(dim=-1) != targets).float())
        return torch.zeros((), device=hidden_BTD.device)
