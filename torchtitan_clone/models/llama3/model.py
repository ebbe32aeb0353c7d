"""Llama 3: plain single-device PyTorch.

Legend: B batch, T tokens, D model, N heads, K kv heads, H head dim, F hidden, V vocabulary.
Source: arXiv 2407.21783.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_clone.models.attention import AttentionMask, CoreAttention, DocumentMask
from torchtitan_clone.models.feed_forward import SwiGLU, swiglu_hidden_dim
from torchtitan_clone.models.rope import RopeScaling, cos_sin, inverse_frequencies, rotate
from torchtitan_clone.models.spec import LossFn


@dataclass(frozen=True, kw_only=True)
class Llama3Args:
    """What distinguishes one Llama from another."""

    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int | None = None
    vocab_size: int = 128256
    multiple_of: int = 256
    ffn_dim_multiplier: float = 1.0
    hidden_dim: int | None = None
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    max_seq_len: int = 131072
    tied_embeddings: bool = False

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.dim // self.n_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.n_kv_heads or self.n_heads

    @property
    def ffn_hidden_dim(self) -> int:
        """Hidden size of the feed-forward: hidden_dim, or where that is unset what the multipliers give."""
        if self.hidden_dim is not None:
            return self.hidden_dim
        return swiglu_hidden_dim(dim=self.dim, ffn_dim_multiplier=self.ffn_dim_multiplier, multiple_of=self.multiple_of)

    def violations(self) -> list[str]:
        """What is wrong with these values, each as one sentence."""
        found = []
        if self.n_heads < 1 or self.dim % self.n_heads or self.head_dim % 2:
            found.append(
                f"model.args: dim {self.dim} over n_heads {self.n_heads} must give heads of an even size; "
                "set dim to an even multiple of n_heads"
            )
        if self.kv_heads < 1 or self.n_heads % self.kv_heads:
            found.append(
                f"model.args: n_kv_heads {self.kv_heads} does not divide n_heads {self.n_heads}; "
                "set n_kv_heads to a divisor"
            )
        positive = ("dim", "n_layers", "vocab_size", "multiple_of", "max_seq_len", "ffn_dim_multiplier", "rope_theta",
                    "hidden_dim")  # fmt: skip
        found += [f"model.args.{name} = {getattr(self, name)} must be above 0" for name in positive
                  if getattr(self, name) is not None and getattr(self, name) <= 0]  # fmt: skip
        return found


class Attention(nn.Module):
    """Grouped-query attention with rotary positions. Source: arXiv 2305.13245."""

    def __init__(self, args: Llama3Args):
        super().__init__()
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)
        self.core = CoreAttention()

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: AttentionMask) -> Tensor:
        """Returns [B, T, D]."""
        # The number of heads is read off the projection, so that a split one (tensor parallel) needs no word here.
        q_BTNH = self.wq(x_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTKH = self.wk(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTKH = self.wv(x_BTD).unflatten(-1, (-1, self.head_dim))
        out_BTNH = self.core(rotate(q_BTNH, *rope), rotate(k_BTKH, *rope), v_BTKH, mask)
        return self.wo(out_BTNH.flatten(-2))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, args: Llama3Args):
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = Attention(args)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = SwiGLU(dim=args.dim, hidden_dim=args.ffn_hidden_dim)

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: AttentionMask) -> Tensor:
        """Returns [B, T, D]."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rope, mask)
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))


class OutputProjection(nn.Module):
    """Hidden states to logits, or straight to the loss, so that logits need never exist all at once.

    The loss is computed in here because only during this module's forward does FSDP hold its weight whole.
    """

    def __init__(self, args: Llama3Args):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(args.vocab_size, args.dim))
        nn.init.normal_(self.weight, std=args.dim**-0.5)

    def forward(self, hidden_BTD: Tensor, targets_BT: Tensor | None = None, loss_fn: LossFn | None = None) -> Tensor:
        """Logits [B, T, V], or the loss."""
        if loss_fn is None or targets_BT is None:
            return F.linear(hidden_BTD, self.weight)
        return loss_fn(hidden_BTD, self.weight, targets_BT)


class Llama3(nn.Module):
    """The whole model, or a stage of it: where embedding, norm or output is None, the input passes through."""

    def __init__(self, args: Llama3Args):
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.attention_mask = DocumentMask()
        self.layers = nn.ModuleDict({str(i): TransformerBlock(args) for i in range(args.n_layers)})
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output = OutputProjection(args)
        if args.tied_embeddings:
            self.output.weight = cast("nn.Parameter", self.tok_embeddings.weight)
        self.register_buffer("inv_freq", torch.empty(args.head_dim // 2, dtype=torch.float32), persistent=False)
        self.init_buffers()

    def init_buffers(self, device: torch.device | None = None) -> None:
        """Computes the rotary frequencies, where they lie or on `device`."""
        self.inv_freq: Tensor = inverse_frequencies(
            head_dim=self.args.head_dim,
            theta=self.args.rope_theta,
            scaling=self.args.rope_scaling,
            device=device or self.inv_freq.device,
        )

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        positions_BT: Tensor,
        documents_BT: Tensor | None = None,
        targets_BT: Tensor | None = None,
        loss_fn: LossFn | None = None,
    ) -> Tensor:
        """Logits [B, T, V], or with `loss_fn` the loss over `targets_BT`.

        `documents_BT` numbers the documents of a row; attention stays within them. None: attention is causal.
        """
        rope = cos_sin(positions_BT, self.inv_freq)
        mask = self.attention_mask(documents_BT)
        h_BTD = self.tok_embeddings(tokens_BT) if self.tok_embeddings is not None else tokens_BT
        for layer in self.layers.values():
            h_BTD = layer(h_BTD, rope, mask)
        h_BTD = self.norm(h_BTD) if self.norm is not None else h_BTD
        return self.output(h_BTD, targets_BT, loss_fn) if self.output is not None else h_BTD


def initial_std(args: Llama3Args, name: str) -> float | None:
    """Standard deviation of the parameter's initial values; None for norms, which start at one.

    What writes to the residual stream starts smaller the deeper it stands.
    """
    if "norm" in name:
        return None
    if name == "output.weight" or (args.tied_embeddings and name == "tok_embeddings.weight"):
        return args.dim**-0.5
    if name == "tok_embeddings.weight":
        return 1.0
    if name.endswith(("attention.wo.weight", "feed_forward.w2.weight", "feed_forward.w3.weight")):
        layer = int(name.split(".")[1])
        return 0.02 / (2 * (layer + 1)) ** 0.5
    return 0.02
