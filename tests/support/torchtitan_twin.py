"""Training in torchtitan's layout: names and rotation of its Llama 3, its states in a checkpoint of DCP.

With a checkout of torchtitan v0.2.2, model, containers and saver are its own.

Legend: B batch, T tokens, D model, N heads, H head dim.
"""

import pickle
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

SIZES: dict[str, Any] = {
    "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 2048, "multiple_of": 32,
    "rope_theta": 500000.0,
}  # fmt: skip
"""Arguments of the model, by the names that torchtitan has for them too."""
QWEN3_SIZES: dict[str, Any] = {
    "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 2048, "head_dim": 32, "hidden_dim": 96,
}  # fmt: skip
OPTIMIZER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
Batch = tuple[list[list[int]], list[list[int]]]
"""Tokens and targets [B, T]."""


@dataclass(frozen=True, kw_only=True)
class TwinRun:
    """A run that is saved to `folder/checkpoint/step-N` after N steps, and goes on with the rest of its batches."""

    folder: str
    batches: list[Batch]
    factors: list[float]
    """Of the learning rate in each step."""
    saved_after: int
    checkout: str | None = None
    """Folder of torchtitan, whose own code then builds and saves; None: that of this file."""
    is_qwen3: bool = False
    """Whether a checkout trains Qwen3 with tied embeddings."""


class Attention(nn.Module):
    """Grouped-query attention that rotates features 0 and 1, 2 and 3, and so on."""

    def __init__(self) -> None:
        super().__init__()
        dim, self.head_dim = SIZES["dim"], SIZES["dim"] // SIZES["n_heads"]
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, SIZES["n_kv_heads"] * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, SIZES["n_kv_heads"] * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (weight(x_BTD).unflatten(-1, (-1, self.head_dim)) for weight in (self.wq, self.wk, self.wv))
        q, k = self.rotate(q), self.rotate(k)
        heads = (x_BTNH.transpose(1, 2) for x_BTNH in (q, k, v))
        out_BNTH = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.wo(out_BNTH.transpose(1, 2).flatten(-2))

    def rotate(self, x_BTNH: Tensor) -> Tensor:
        frequencies = 1.0 / SIZES["rope_theta"] ** (torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.outer(torch.arange(x_BTNH.shape[1]), frequencies)[:, None]
        even, odd = x_BTNH[..., ::2], x_BTNH[..., 1::2]
        pairs = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
        return torch.stack(pairs, dim=-1).flatten(-2)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        dim, multiple = SIZES["dim"], SIZES["multiple_of"]
        hidden = -(-(8 * dim // 3) // multiple) * multiple
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class Block(nn.Module):
    """A layer with norms before attention and feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(SIZES["dim"], eps=1e-5) for _ in range(2))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))


class Llama(nn.Module):
    """Llama 3 with torchtitan's names."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(SIZES["vocab_size"], SIZES["dim"])
        self.layers = nn.ModuleDict({str(layer): Block() for layer in range(SIZES["n_layers"])})
        self.norm = nn.RMSNorm(SIZES["dim"], eps=1e-5)
        self.output = nn.Linear(SIZES["dim"], SIZES["vocab_size"], bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.tok_embeddings(tokens_BT)
        for layer in self.layers.values():
            x_BTD = layer(x_BTD)
        return self.output(self.norm(x_BTD))


class TrainState:
    """The state of torchtitan's trainer, which counts the tokens of its own rank."""

    def __init__(self) -> None:
        self.step = 0
        self.ntokens_seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise NotImplementedError


class Saver:
    """Optimizer, schedule, and the saving of all states with DCP."""

    def __init__(self, run: TwinRun, *, model: Any) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: run.factors[step])
        self._run = run
        self._model = model

    def save(self, state: TrainState) -> None:
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        states = {
            **get_model_state_dict(self._model),
            "optimizer": get_optimizer_state_dict(self._model, self.optimizer, options=flat),
            "lr_scheduler": self.schedule.state_dict(),
            "train_state": state.state_dict(),
            "dataloader": {f"dp_rank_{dist.get_rank()}": pickle.dumps({}), "world_size": dist.get_world_size()},
        }
        dcp.save(states, checkpoint_id=f"{self._run.folder}/checkpoint/step-{state.step}")


class TorchtitanSaver:
    """The same by torchtitan's own code."""

    def __init__(self, run: TwinRun, *, model: Any) -> None:
        from torchtitan.components.lr_scheduler import LRSchedulersContainer
        from torchtitan.components.optimizer import OptimizersContainer

        self._optimizers = OptimizersContainer([model], torch.optim.AdamW, OPTIMIZER)
        self._schedules = LRSchedulersContainer(self._optimizers, lambda step: run.factors[step])
        self.optimizer, self.schedule = self._optimizers, self._schedules
        self._run = run
        self._model = model

    def save(self, state: TrainState) -> None:
        from torchtitan.components.checkpoint import CheckpointManager
        from torchtitan.components.dataloader import ParallelAwareDataloader
        from torchtitan.config.job_config import Checkpoint

        data = torch.utils.data.ChainDataset([])
        manager = CheckpointManager(
            ParallelAwareDataloader(data, dist.get_rank(), dist.get_world_size(), batch_size=4),
            [self._model], self._optimizers, self._schedules, {"train_state": state},
            Checkpoint(enable=True, interval=state.step, keep_latest_k=0), None, base_folder=self._run.folder,
        )  # fmt: skip
        manager.save(state.step)
        manager.close()


def train_and_save(run: TwinRun) -> list[float]:
    """Trains as one rank, sharded if there are several; returns the mean loss of each step."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build(run)
    if world_size > 1:
        mesh = init_device_mesh("cpu", (world_size,))
        for module in (*model.layers.children(), model):
            fully_shard(module, mesh=mesh)
    saver = (Saver if run.checkout is None else TorchtitanSaver)(run, model=model)
    state, losses = TrainState(), []
    for batch in run.batches:
        tokens_BT, targets_BT = (torch.tensor(each).chunk(world_size)[rank] for each in batch)
        loss = F.cross_entropy(model(tokens_BT).flatten(0, 1), targets_BT.flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        saver.optimizer.step()
        saver.schedule.step()
        saver.optimizer.zero_grad()
        state.step += 1
        state.ntokens_seen += targets_BT.numel()
        dist.all_reduce(mean := loss.detach() / world_size)
        losses.append(mean.item())
        if state.step == run.saved_after:
            saver.save(state)
    dist.destroy_process_group()
    return losses


def build(run: TwinRun) -> Any:
    """Returns the model; weights are large, so that attention is not uniform."""
    if run.checkout is None:
        model: Any = Llama()
    else:
        sys.path.insert(0, run.checkout)
        from torchtitan.models.llama3.model.args import TransformerModelArgs
        from torchtitan.models.llama3.model.model import Transformer
        from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
        from torchtitan.models.qwen3.model.model import Qwen3Model

        tied = Qwen3ModelArgs(**QWEN3_SIZES, max_seq_len=64, enable_weight_tying=True)
        llama = TransformerModelArgs(**SIZES, max_seq_len=64)
        model = Qwen3Model(tied) if run.is_qwen3 else Transformer(llama)
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return model
