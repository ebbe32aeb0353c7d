"""Tests of decoder.py: auxiliary terms, pipeline stages, FSDP groups and buffers."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchtitan_clone.models.attention import Attention
from torchtitan_clone.models.decoder import Decoder, ModelArgs, TransformerBlock, named_state
from torchtitan_clone.ops.layers import SwiGLU

NAMES = {"balance": 0.1, "z": 0.01}


@dataclass(frozen=True, kw_only=True)
class Args(ModelArgs):
    """A family that is not in MODELS."""

    head_dim: int = 8


ARGS = Args(dim=16, n_layers=4, n_heads=2, vocab_size=11, max_seq_len=32)
MODULES = ["tok_embeddings", *(f"layers.{index}" for index in range(ARGS.n_layers)), "norm", "output"]


class Summing(SwiGLU):
    """A feed-forward with two auxiliary terms and a buffer that is state."""

    def __init__(self, *, dim, hidden_dim):
        super().__init__(dim=dim, hidden_dim=hidden_dim)
        self.register_buffer("bias", torch.empty(3))

    def init_buffers(self, device=None):
        self.bias = torch.full((3,), 0.5, device=device or self.bias.device)

    def forward(self, x_BTD):
        out_BTD = super().forward(x_BTD)
        return out_BTD, torch.stack((out_BTD.float().square().sum(), out_BTD.float().abs().sum()))


def build_block(args, layer):
    """Builds a block, in the first layer without auxiliary terms, like families whose first layers are dense."""
    attention = Attention(dim=args.dim, n_heads=args.n_heads, kv_heads=args.kv_heads, head_dim=args.head_dim)
    feed_forward = Summing if layer else SwiGLU
    return TransformerBlock(args, attention=attention, feed_forward=feed_forward(dim=args.dim, hidden_dim=24))


def build(auxiliary=NAMES, **changes):
    torch.manual_seed(0)
    return Decoder(Args(**{**vars(ARGS), **changes}), build_block=build_block, auxiliary=auxiliary)


def loss_fn(hidden_BTD, weight_VD, targets_BT):
    return F.cross_entropy((hidden_BTD @ weight_VD.T).flatten(0, 1), targets_BT.flatten(), reduction="sum")


def inputs():
    tokens_BT = torch.arange(14).reshape(2, 7) % 11
    keywords = {"positions_BT": torch.arange(7).expand(2, 7), "targets_BT": tokens_BT.flip(1), "loss_fn": loss_fn}
    return tokens_BT, keywords


def test_auxiliary_sums_are_returned_beside_the_loss():
    model = build()
    tokens_BT, keywords = inputs()
    found = []
    for layer in model.layers.values():
        layer.feed_forward.register_forward_hook(lambda _module, _args, out: found.append(out))
    out = model(tokens_BT, **keywords)
    assert out.shape == (3,)
    sums = [layer_out[1] for layer_out in found if isinstance(layer_out, tuple)]
    assert len(sums) == 3
    torch.testing.assert_close(out[1:], torch.stack(sums).sum(0))
    logits = model(tokens_BT, positions_BT=keywords["positions_BT"])
    expected = F.cross_entropy(logits.flatten(0, 1), keywords["targets_BT"].flatten(), reduction="sum")
    torch.testing.assert_close(out[0], expected)


@pytest.mark.parametrize("cut", [1, 3])
def test_stages_pass_the_sums_on(cut):
    tokens_BT, keywords = inputs()
    complete = build()
    expected = complete(tokens_BT, **keywords)
    (expected * torch.tensor([1.0, 0.1, 0.01])).sum().backward()
    first, last = build(), build()
    first.keep_modules(MODULES[: cut + 1])
    last.keep_modules(MODULES[cut + 1 :])
    passed = first(tokens_BT, **keywords)
    assert [tensor.shape for tensor in passed] == [(2, 7, 16), (2,)]
    out = last(*passed, **keywords)
    assert torch.equal(out, expected)
    (out * torch.tensor([1.0, 0.1, 0.01])).sum().backward()
    gradients = {name: p.grad for stage in (first, last) for name, p in stage.named_parameters()}
    assert set(gradients) == {name for name, _ in complete.named_parameters()}
    assert all(torch.equal(gradients[name], p.grad) for name, p in complete.named_parameters())


def test_without_auxiliary_terms_the_loss_is_a_scalar():
    tokens_BT, keywords = inputs()
    model = Decoder(ARGS, build_block=lambda args, _layer: build_block(args, 0))
    assert dict(model.auxiliary) == {}
    assert model(tokens_BT, **keywords).shape == ()
    model.keep_modules(MODULES[:2])
    assert model(tokens_BT, **keywords).shape == (2, 7, 16)


def test_buffers_are_state_and_are_initialized():
    with torch.device("meta"):
        model = build()
    assert not any("inv_freq" in name for name in named_state(model))
    assert [name for name in named_state(model) if "bias" in name] == [
        f"layers.{layer}.feed_forward.bias" for layer in (1, 2, 3)
    ]
    model.to_empty(device="cpu")
    model.init_buffers(torch.device("cpu"))
    assert torch.equal(model.layers["2"].feed_forward.bias, torch.full((3,), 0.5))
    assert torch.equal(model.rotary[0].inv_freq, build().rotary[0].inv_freq)
    tied = named_state(build(tied_embeddings=True))
    assert "output.weight" not in tied
    assert next(iter(tied)) == "tok_embeddings.weight"


def described(model):
    """Returns the FSDP groups by the names of their modules."""
    names = {module: name for name, module in model.named_modules()}
    return [
        ([names[module] for module in group.modules], group.is_block, group.starts_backward, group.is_lookup)
        for group in model.fsdp_groups()
    ]


def test_groups_for_fsdp():
    blocks = [([f"layers.{index}"], True, False, False) for index in range(4)]
    embedding, ends = (["tok_embeddings"], False, False, True), (["norm", "output"], False, True, False)
    assert described(build()) == [embedding, *blocks, ends]
    tied = build(tied_embeddings=True)
    assert described(tied) == [*blocks, (["tok_embeddings", "norm", "output"], False, True, False)]
    stage = build()
    stage.keep_modules({"tok_embeddings", "layers.0"})
    assert described(stage) == [embedding, blocks[0]]
    stage = build()
    stage.keep_modules({"layers.3", "norm"})
    assert described(stage) == [blocks[3], (["norm"], False, True, False)]


def test_names_of_parameters_remain_when_modules_are_removed():
    model, stage = build(), build()
    stage.keep_modules(["layers.2", "output"])
    assert isinstance(stage.layers, nn.ModuleDict)
    kept = [name for name, _ in stage.named_parameters()]
    assert kept == [name for name, _ in model.named_parameters() if name.startswith(("layers.2.", "output."))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_changes_no_bit_and_is_not_kept(dtype):
    """Kept for backward: the input and both of its projections, from which what w2 reads is computed again."""
    torch.manual_seed(0)
    layer = SwiGLU(dim=16, hidden_dim=24).to(dtype)
    x_BTD, grad_BTD = (torch.randn(2, 7, 16).to(dtype).requires_grad_() for _ in range(2))
    kept = set()
    weights = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
    pack = lambda x: kept.add(x.untyped_storage().data_ptr()) or x  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out_BTD = layer(x_BTD)
    assert len(kept - weights) == 3
    expected_BTD = layer.w2(F.silu(layer.w1(x_BTD)) * layer.w3(x_BTD))
    assert torch.equal(out_BTD, expected_BTD)
    inputs = [x_BTD, *layer.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad(y, inputs, grad_BTD) for y in (out_BTD, expected_BTD)), strict=True):
        assert torch.equal(ours, theirs)
