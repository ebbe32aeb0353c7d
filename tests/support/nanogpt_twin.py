"""Training in nanoGPT's layout: names of its GPT, groups of its optimizer, entries of its ckpt.pt.

Legend: B batch, T tokens, D model, N heads, H head dim.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tests.support.torchtitan_twin import TwinRun

SIZES: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": 64, "vocab_size": 2112, "dropout": 0.0}
"""Arguments of the model; the vocabulary is that of the tokenizer, padded."""
OPTIMIZER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95)}
WEIGHT_DECAY = 0.1


class Norm(nn.Module):
    """LayerNorm with or without a bias."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZES["n_embd"]))
        self.bias = nn.Parameter(torch.zeros(SIZES["n_embd"])) if bias else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.layer_norm(x_BTD, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    """Causal attention with queries, keys and values from one matrix, and a mask among the buffers."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        dim, tokens = SIZES["n_embd"], SIZES["block_size"]
        self.c_attn = nn.Linear(dim, 3 * dim, bias=bias)
        self.c_proj = nn.Linear(dim, dim, bias=bias)
        self.register_buffer("bias", torch.ones(tokens, tokens).tril()[None, None])

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads = (x.unflatten(-1, (SIZES["n_head"], -1)).transpose(1, 2) for x in self.c_attn(x_BTD).chunk(3, dim=-1))
        out_BNTH = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.c_proj(out_BNTH.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Two matrices with GELU between them."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.c_fc = nn.Linear(SIZES["n_embd"], 4 * SIZES["n_embd"], bias=bias)
        self.c_proj = nn.Linear(4 * SIZES["n_embd"], SIZES["n_embd"], bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x_BTD)))


class Block(nn.Module):
    """A layer with norms before attention and feed-forward."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.ln_1, self.attn = Norm(bias=bias), Attention(bias=bias)
        self.ln_2, self.mlp = Norm(bias=bias), MLP(bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.ln_1(x_BTD))
        return x_BTD + self.mlp(self.ln_2(x_BTD))


class GPT(nn.Module):
    """The model, with learned positions and tied embeddings."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        dim = SIZES["n_embd"]
        parts = {
            "wte": nn.Embedding(SIZES["vocab_size"], dim),
            "wpe": nn.Embedding(SIZES["block_size"], dim),
            "h": nn.ModuleList(Block(bias=bias) for _ in range(SIZES["n_layer"])),
            "ln_f": Norm(bias=bias),
        }
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(dim, SIZES["vocab_size"], bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        parts: Any = self.transformer
        x_BTD = parts["wte"](tokens_BT) + parts["wpe"](torch.arange(tokens_BT.shape[1]))
        for block in parts["h"]:
            x_BTD = block(x_BTD)
        return self.lm_head(parts["ln_f"](x_BTD))


def train_and_save(run: TwinRun, *, bias: bool, is_compiled: bool = False) -> list[float]:
    """Trains and saves `run.folder`/ckpt.pt, compiled as with names of torch.compile; returns the loss of each step."""
    model = GPT(bias=bias)
    torch.manual_seed(0)
    for name, weight in model.named_parameters():  # large, so that attention is not uniform
        nn.init.normal_(weight, mean=float(".ln_" in name and "weight" in name), std=0.1)
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == each] for each in (True, False))
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer, losses = torch.optim.AdamW(groups, **OPTIMIZER), []
    for step, (tokens, targets) in enumerate(run.batches):
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER["lr"] * run.factors[step]
        loss = F.cross_entropy(model(torch.tensor(tokens)).flatten(0, 1), torch.tensor(targets).flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step + 1 == run.saved_after:
            state = model.state_dict()
            if is_compiled:
                state = OrderedDict((f"_orig_mod.{name}", tensor) for name, tensor in state.items())
            entries = {"model": state, "optimizer": optimizer.state_dict(), "iter_num": step + 1}
            save(Path(run.folder), entries, bias=bias, rows=len(tokens))
    return losses


def save(folder: Path, entries: dict[str, Any], *, bias: bool, rows: int) -> None:
    """Writes a ckpt.pt with these entries and the others of nanoGPT."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"learning_rate": OPTIMIZER["lr"], "batch_size": rows // 2, "gradient_accumulation_steps": 2}
    others = {
        "model_args": {**SIZES, "bias": bias}, "best_val_loss": torch.tensor(3.5),
        "config": {**settings, "dataset": "shakespeare_char", "compile": True, "grad_clip": 1.0},
    }  # fmt: skip
    torch.save({**others, **entries}, folder / "ckpt.pt")
