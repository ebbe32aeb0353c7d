"""What differs between the layers of one decoder: which tokens attention sees, and what it knows of positions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtitan_clone.models.rope import QueryScale, RopeArgs


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """A kind of layers; masks and rotations are computed once for all layers of a kind."""

    positions: RopeArgs | QueryScale | None
    window: int | None = None
    """A token attends to itself and to the `window` - 1 tokens before it."""
    chunk: int | None = None
    """A token attends to the tokens before it that are in its chunk: documents are divided into chunks of this size,
    from their first token on, so that a document's result does not depend on what is packed before it."""
    recurrent: int | None = None
    """A token sees a state instead of others; attention to so many tokens has as many FLOPs as the state's products."""

    selected: int | None = None
    """A token attends to so many of the tokens that it sees, which an indexer selects."""
    index_dim: int = 0
    """Dimensions of all heads of the indexer, which scores all tokens that a token sees."""

    @property
    def limits(self) -> tuple[int | None, int | None, bool]:
        """What a token sees of its document: a window, a chunk, and whether first tokens are wanted, not a mask."""
        return self.window, self.chunk, self.recurrent is not None or self.selected is not None

    def attended_tokens(self, seq_len: int) -> int:
        """Returns the most tokens that one token attends to."""
        limits = (self.window, self.chunk, self.selected)
        return self.recurrent or min(seq_len, *(each or seq_len for each in limits))

    def mean_attended_tokens(self, seq_len: int) -> float:
        """Returns how many tokens one token attends to on average, in a sequence that is one document."""
        # What is not selected is computed too.
        most = seq_len if self.selected else self.attended_tokens(seq_len)
        if self.recurrent:
            return most
        if self.chunk and most == self.chunk:
            return most / 2
        return most * (1 - most / (2 * seq_len))


def repeat_pattern(pattern: Sequence[str], kinds: Mapping[str, LayerKind], *, n_layers: int) -> list[LayerKind]:
    """Returns the kind of each layer: `pattern` names them, and repeats."""
    return [kinds[pattern[layer % len(pattern)]] for layer in range(n_layers)]


def find_pattern_errors(pattern: Sequence[str], *, n_layers: int) -> list[str]:
    """Returns a sentence where a pattern does not fill the layers."""
    if pattern and n_layers % len(pattern) == 0:
        return []
    rule = f"must divide n_layers {n_layers}; name one kind for every layer, or a pattern that repeats"
    return [f"model.args.layer_types has {len(pattern)} entries, which {rule}"]
