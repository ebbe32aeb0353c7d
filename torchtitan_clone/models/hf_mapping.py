"""Declares which tensors of the Hugging Face hub hold a model's tensors.

A mapping has a rule for each of our names, with * for the number of a layer; the same * stands in the hub's name. A
rule gives the pieces of a tensor of a shape; ops/tensor_pieces.py derives import and export from these.

Legend: E experts, F hidden, D model.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torchtitan_clone.ops.tensor_pieces import Piece

Rule = Callable[[tuple[int, ...]], list[Piece]]
"""Gives the pieces of our tensor from its shape; the names of the pieces may contain *."""


def same(name: str) -> Rule:
    """One tensor of the hub with the same values and shape."""
    return lambda shape: [Piece(source=name, shape=shape)]


def stacked(rule: Callable[[str], Rule], name: str) -> Rule:
    """One tensor of the hub for each index of our first dimension, which {index} in `name` stands for.

    `rule` maps one of them: `stacked(same, "experts.{index}.up_proj.weight")` for our [E, F, D].
    """

    def pieces(shape: tuple[int, ...]) -> list[Piece]:
        return [
            replace(piece, to=(index, *piece.to))
            for index in range(shape[0])
            for piece in rule(name.replace("{index}", str(index)))(shape[1:])
        ]

    return pieces


def transposed(name: str) -> Rule:
    """One tensor of the hub whose last two dimensions are exchanged."""

    def pieces(shape: tuple[int, ...]) -> list[Piece]:
        *others, rows, columns = shape
        return [Piece(source=name, shape=(*others, columns, rows), transpose=(len(shape) - 2, len(shape) - 1))]

    return pieces


def fused(rule: Rule, *, dim: int, index: int, count: int = 2, interleaved: bool = False) -> Rule:
    """Our tensor is one of `count` equal shares of a tensor of the hub along the hub's `dim`.

    `rule` maps our tensor to a tensor of the share's size. Shares follow one another, gate before up for example, or
    are interleaved: `index::count`.
    """

    def pieces(shape: tuple[int, ...]) -> list[Piece]:
        (share,) = rule(shape)
        size = share.shape[dim]
        along = slice(index, None, count) if interleaved else slice(index * size, (index + 1) * size)
        complete = (*share.shape[:dim], size * count, *share.shape[dim + 1 :])
        return [replace(share, shape=complete, of=(*[slice(None)] * dim, along))]

    return pieces


def joined(*names: str, dim: int = 0, interleaved: bool = False) -> Rule:
    """Our tensor consists of equal tensors of the hub along our `dim`, one after another or interleaved."""

    def pieces(shape: tuple[int, ...]) -> list[Piece]:
        count = len(names)
        size = shape[dim] // count
        each = (*shape[:dim], size, *shape[dim + 1 :])
        found = []
        for index, name in enumerate(names):
            along = slice(index, None, count) if interleaved else slice(index * size, (index + 1) * size)
            found.append(Piece(source=name, shape=each, to=(*[slice(None)] * dim, along)))
        return found

    return pieces


@dataclass(frozen=True)
class TensorMapping:
    """The rules of a model by our names of parameters and persistent buffers."""

    rules: Mapping[str, Rule]

    def pieces(self, name: str, *, shape: Sequence[int]) -> list[Piece]:
        """Returns the pieces of our tensor of that name and shape; KeyError where no rule has it."""
        match = re.fullmatch(r"(layers\.)(\d+)(\..*)", name)
        rule = self.rules[f"{match[1]}*{match[3]}" if match else name]
        layer = match[2] if match else ""
        return [replace(piece, source=piece.source.replace("*", layer)) for piece in rule(tuple(shape))]


DECODER_RULES: Mapping[str, Rule] = {
    "tok_embeddings.weight": same("model.embed_tokens.weight"),
    "layers.*.attention_norm.weight": same("model.layers.*.input_layernorm.weight"),
    "layers.*.attention.wq.weight": same("model.layers.*.self_attn.q_proj.weight"),
    "layers.*.attention.wk.weight": same("model.layers.*.self_attn.k_proj.weight"),
    "layers.*.attention.wv.weight": same("model.layers.*.self_attn.v_proj.weight"),
    "layers.*.attention.wo.weight": same("model.layers.*.self_attn.o_proj.weight"),
    "layers.*.ffn_norm.weight": same("model.layers.*.post_attention_layernorm.weight"),
    "layers.*.feed_forward.w1.weight": same("model.layers.*.mlp.gate_proj.weight"),
    "layers.*.feed_forward.w2.weight": same("model.layers.*.mlp.down_proj.weight"),
    "layers.*.feed_forward.w3.weight": same("model.layers.*.mlp.up_proj.weight"),
    "norm.weight": same("model.norm.weight"),
    "output.weight": same("lm_head.weight"),
}
"""The names that Llama, Qwen and their descendants share."""
