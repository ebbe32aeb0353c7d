"""Declares which tensors of the Hugging Face hub hold a model's tensors; ops/tensor_slices.py imports and exports."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torchtitan_clone.ops.tensor_slices import Index, TensorSlice

Rule = Callable[[tuple[int, ...]], list[TensorSlice]]
"""Returns the slices of our tensor from its shape; * in the name of a source stands for the number of the layer."""
Rules = Mapping[str, Rule]
"""The rule of each of our parameters and persistent buffers, by name, or by name with * for the number of a layer."""


def same(name: str) -> Rule:
    """One tensor of the hub with the same values and shape."""
    return lambda shape: [TensorSlice(source=name, shape=shape)]


def optional(name: str) -> Rule:
    """One tensor of the hub, without which ours keeps its first values."""
    return lambda shape: [TensorSlice(source=name, shape=shape, is_optional=True)]


def repeated(name: str, *copies: str) -> Rule:
    """One tensor of the hub, which releases repeat under other names."""
    return lambda shape: [TensorSlice(source=each, shape=shape, is_copy=each in copies) for each in (name, *copies)]


def stacked(rule: Callable[[str], Rule], name: str) -> Rule:
    """One tensor of the hub for each {index} of our first dimension, mapped by `rule`, as "experts.{index}.weight"."""

    def slices(shape: tuple[int, ...]) -> list[TensorSlice]:
        return [
            replace(part, to=(index, *part.to))
            for index in range(shape[0])
            for part in rule(name.replace("{index}", str(index)))(shape[1:])
        ]

    return slices


def transposed(name: str) -> Rule:
    """One tensor of the hub whose last two dimensions are exchanged."""

    def slices(shape: tuple[int, ...]) -> list[TensorSlice]:
        *others, rows, columns = shape
        return [TensorSlice(source=name, shape=(*others, columns, rows), transpose=(len(shape) - 2, len(shape) - 1))]

    return slices


def fused(rule: Rule, *, dim: int, index: int, count: int = 2, interleaved: bool = False) -> Rule:
    """Our tensor, mapped by `rule`, is share `index` of `count` along the hub's `dim`: a block, or `index::count`."""

    def slices(shape: tuple[int, ...]) -> list[TensorSlice]:
        (share,) = rule(shape)
        size = share.shape[dim]
        complete = (*share.shape[:dim], size * count, *share.shape[dim + 1 :])
        return [replace(share, shape=complete, of=_share(index, dim=dim, size=size, step=count if interleaved else 1))]

    return slices


def _share(index: int, *, dim: int, size: int, step: int) -> Index:
    """Index of a share along `dim`: a block of `size`, or with a step above 1 every `step`-th position."""
    along = slice(index * size, (index + 1) * size) if step == 1 else slice(index, None, step)
    return (*[slice(None)] * dim, along)


def rows(rule: Rule, *, first: int, total: int) -> Rule:
    """Our tensor, mapped by `rule`, is the rows from `first` on of a tensor of the hub with so many rows in all."""

    def slices(shape: tuple[int, ...]) -> list[TensorSlice]:
        (part,) = rule(shape)
        own = slice(first, first + shape[0])
        return [replace(part, shape=(total, *part.shape[1:]), of=(own, *part.of[1:]))]

    return slices


def of_heads(name: str, *, size: int, first: int, total: int) -> Rule:
    """Our tensor has `size` rows of each head, from its row `first` on, of which the hub's has `total`."""

    def slices(shape: tuple[int, ...]) -> list[TensorSlice]:
        complete = (shape[0] // size * total, *shape[1:])
        starts = {start: start // size * total + first for start in range(0, shape[0], size)}
        return [
            TensorSlice(source=name, shape=complete, of=(slice(theirs, theirs + size),), to=(slice(ours, ours + size),))
            for ours, theirs in starts.items()
        ]

    return slices


def channels(name: str) -> Rule:
    """One tensor of the hub, a convolution of each channel: [channels, 1, width], and ours without the 1."""
    return lambda shape: [TensorSlice(source=name, shape=(shape[0], 1, *shape[1:]), of=(slice(None), 0))]


def joined(*names: str, dim: int = 0, interleaved: bool = False) -> Rule:
    """Our tensor consists of equal tensors of the hub along our `dim`, consecutive or interleaved."""

    def slices(shape: tuple[int, ...]) -> list[TensorSlice]:
        size = shape[dim] // len(names)
        each = (*shape[:dim], size, *shape[dim + 1 :])
        step = len(names) if interleaved else 1
        shares = [_share(index, dim=dim, size=size, step=step) for index in range(len(names))]
        return [TensorSlice(source=name, shape=each, to=share) for name, share in zip(names, shares, strict=True)]

    return slices


def rotary_rows(name: str, *, plain: int, rotary: int, rotary_first: bool = False) -> Rule:
    """One tensor of the hub with heads of `plain` and `rotary` rows, which are rotated as pairs of neighbors there.

    Ours are pairs of the same index in both halves. `rotary_first`: the order of both kinds of rows, there and here.
    """

    def slices(shape: tuple[int, ...]) -> list[TensorSlice]:
        half = rotary // 2
        rows: list[tuple[slice, slice]] = []
        for first in range(0, shape[0], plain + rotary):
            start = first if rotary_first else first + plain
            middle, stop = start + half, start + rotary
            others = slice(stop, stop + plain) if rotary_first else slice(first, start)
            rows += [(others, others), (slice(start, stop, 2), slice(start, middle))]
            rows += [(slice(start + 1, stop, 2), slice(middle, stop))]
        return [TensorSlice(source=name, shape=shape, of=(theirs,), to=(ours,)) for theirs, ours in rows]

    return slices


def slices_of(rules: Rules, name: str, *, shape: Sequence[int], prefix: str = "") -> list[TensorSlice]:
    """Returns the slices of our tensor of that name and shape, with names after a prefix; KeyError without a rule."""
    match = re.fullmatch(r"layers\.(\d+)\.(.*)", name)
    rule = rules[f"layers.*.{match[2]}" if match and name not in rules else name]
    layer = match[1] if match else ""
    return [replace(part, source=prefix + part.source.replace("*", layer)) for part in rule(tuple(shape))]


def swiglu_rules(ours: str, theirs: str) -> Rules:
    """Returns the rules of a SwiGLU feed-forward from the names of both modules."""
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    return {f"{ours}.{weight}.weight": same(f"{theirs}.{name}.weight") for weight, name in names.items()}


DECODER_RULES: Rules = {
    "tok_embeddings.weight": same("model.embed_tokens.weight"),
    "layers.*.attention_norm.weight": same("model.layers.*.input_layernorm.weight"),
    "layers.*.attention.wq.weight": same("model.layers.*.self_attn.q_proj.weight"),
    "layers.*.attention.wk.weight": same("model.layers.*.self_attn.k_proj.weight"),
    "layers.*.attention.wv.weight": same("model.layers.*.self_attn.v_proj.weight"),
    "layers.*.attention.wo.weight": same("model.layers.*.self_attn.o_proj.weight"),
    "layers.*.ffn_norm.weight": same("model.layers.*.post_attention_layernorm.weight"),
    **swiglu_rules("layers.*.feed_forward", "model.layers.*.mlp"),
    "norm.weight": same("model.norm.weight"),
    "output.weight": same("lm_head.weight"),
}
"""Rules that Llama, Qwen and their descendants share."""
BIAS_RULES: Rules = {
    f"layers.*.attention.w{name}.bias": same(f"model.layers.*.self_attn.{name}_proj.bias") for name in "qkv"
}
QK_NORM_RULES: Rules = {
    f"layers.*.attention.{name}.weight": same(f"model.layers.*.self_attn.{name}.weight")
    for name in ("q_norm", "k_norm")
}

_ROUTER, _EXPERTS = "layers.*.feed_forward.router", "layers.*.feed_forward.experts"
EXPERT_RULES: Rules = {
    f"{_ROUTER}.weight": same("model.layers.*.mlp.gate.weight"),
    f"{_ROUTER}.expert_bias": same("model.layers.*.mlp.gate.e_score_correction_bias"),
    f"{_ROUTER}.expert_load": lambda _shape: [],  # not on the hub
    f"{_EXPERTS}.w1": stacked(same, "model.layers.*.mlp.experts.{index}.gate_proj.weight"),
    f"{_EXPERTS}.w2": stacked(same, "model.layers.*.mlp.experts.{index}.down_proj.weight"),
    f"{_EXPERTS}.w3": stacked(same, "model.layers.*.mlp.experts.{index}.up_proj.weight"),
}
"""Rules of a router and of experts that are stored one by one."""
GATE_UP_RULES: Rules = {
    f"{_EXPERTS}.w1": fused(same("model.layers.*.mlp.experts.gate_up_proj"), dim=1, index=0),
    f"{_EXPERTS}.w2": same("model.layers.*.mlp.experts.down_proj"),
    f"{_EXPERTS}.w3": fused(same("model.layers.*.mlp.experts.gate_up_proj"), dim=1, index=1),
}
"""Rules of experts in two tensors that are not transposed; gates are the first half of one."""


def stacked_expert_rules(mlp: str, *, interleaved: bool) -> Rules:
    """Returns rules of a router and of experts in two tensors: gates are one half of the first, or interleaved."""
    gate_up = transposed(f"{mlp}.experts.gate_up_proj")
    return {
        f"{_ROUTER}.weight": same(f"{mlp}.router.weight"),
        f"{_ROUTER}.expert_load": EXPERT_RULES[f"{_ROUTER}.expert_load"],
        f"{_EXPERTS}.w1": fused(gate_up, dim=2, index=0, interleaved=interleaved),
        f"{_EXPERTS}.w2": transposed(f"{mlp}.experts.down_proj"),
        f"{_EXPERTS}.w3": fused(gate_up, dim=2, index=1, interleaved=interleaved),
    }
