"""The programs that benchmarks/peers.py compares: each trains the same work in its own way, and serves turns.

    python benchmarks/peer_programs.py nanoGPT '{"size": "16M", ...}'

All have blocks of the same products: nanoGPT's two of its feed-forward are wider in exchange for the third. They learn
random tokens, which costs no time to read; ours and the plain loop read text.
"""

import contextlib
import functools
import gc
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

from benchmarks.peers import SIZES, Size
from benchmarks.turns import Turn, serve_turns
from torchtitan_clone.cpu.tensor_region import use_tensor_region

MANY_STEPS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every program does: a size, its precision, eager or compiled, on which device.

    Options of ours alone: `micro_batches`, `tied` (one weight for the embedding and the output), `graph` (of CUDA), and
    those of activation checkpointing.
    """

    size: str
    micro_batches: int = 1
    activation_checkpoint: str = "none"
    selective_ac_option: str = "2"
    first_blocks: int = -1
    tied: bool = False
    graph: bool = False
    dtype: str = "float32"
    compile: bool = False
    device: str = "cpu"

    @property
    def of(self) -> Size:
        return SIZES[self.size]

    @property
    def is_bf16(self) -> bool:
        return self.dtype == "bfloat16"

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.is_bf16)

    def batches(self) -> Iterator[Tensor]:
        """Yields rows of random tokens, one more than the model's inputs, for the targets."""
        generator = torch.Generator().manual_seed(0)
        size = self.of
        while True:
            yield torch.randint(size.vocab, (size.rows, size.tokens + 1), generator=generator)


# ---------------------------------------------------------------- this package, and its model in a plain loop


def options_of(work: Work, folder: str) -> list[str]:
    size = work.of
    values = {
        "job.dump_folder": folder, "training.seq_len": size.tokens, "training.global_batch_size": size.rows,
        "training.local_batch_size": size.rows // work.micro_batches,
        "training.steps": MANY_STEPS, "training.document_masking": "false",
        "training.mixed_precision_param": work.dtype, "compile.enable": str(work.compile).lower(),
        "compile.cuda_graph": str(work.graph).lower(),
        "activation_checkpoint.mode": work.activation_checkpoint,
        "activation_checkpoint.selective_ac_option": work.selective_ac_option,
        "activation_checkpoint.first_blocks": work.first_blocks,
        "data.cache_folder": Path.home() / ".cache" / "torchtitan_clone",  # text is not tokenized for each program
        "checkpoint.enable": "false", "validation.enable": "false",
        "model.args.dim": size.dim, "model.args.n_layers": size.layers, "model.args.n_heads": size.heads,
        "model.args.n_kv_heads": size.heads, "model.args.vocab_size": size.vocab,
        "model.args.hidden_dim": size.hidden, "model.args.tied_embeddings": str(work.tied).lower(),
    }  # fmt: skip
    return [f"--{key}={value}" for key, value in values.items()]


def train_ours(work: Work, turn: Turn) -> None:
    """Trains with this package's trainer."""
    from tests.support.trainers import open_trainer

    with tempfile.TemporaryDirectory() as folder, open_trainer(options_of(work, folder)) as trainer:
        for step in itertools.count(1):
            turn()
            trainer.train_step(step)


def train_plain_loop(work: Work, turn: Turn) -> None:
    """Trains this package's model with a loop of a few lines."""
    from tests.support.plain_loop import PlainLoop

    with tempfile.TemporaryDirectory() as folder:
        loop = PlainLoop(options_of(work, folder))
        for step in itertools.count(1):
            turn()
            loop.train_step(step)


def multiply(work: Work, turn: Turn) -> None:
    """Computes the products of a step, forward and backward, and nothing else."""
    size, dtype = work.of, getattr(torch, work.dtype)
    block = [(size.dim, size.dim)] * 4 + [(size.dim, size.hidden)] * 2 + [(size.hidden, size.dim)]
    shapes = [*block * size.layers, (size.dim, size.vocab)]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=work.device).to(dtype)

    tokens = size.rows * size.tokens
    tensors = {(i, o): (draw(tokens, i), draw(o, i), draw(tokens, o)) for i, o in set(shapes)}
    while True:
        turn()
        for shape in shapes:
            x_XI, weight_OI, grad_XO = tensors[shape]
            torch.mm(x_XI, weight_OI.T)
            torch.mm(grad_XO, weight_OI)
            torch.mm(grad_XO.T, x_XI)


# ---------------------------------------------------------------- nanoGPT, after its published design


class NanoBlock(nn.Module):
    """Pre-norm block: causal attention, then two products with GELU in between."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        hidden = size.hidden * 3 // 2  # as many products as the gated feed-forward of the others
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.dim, bias=False)
        self.qkv = nn.Linear(size.dim, 3 * size.dim, bias=False)
        self.out = nn.Linear(size.dim, size.dim, bias=False)
        self.ffn_norm = nn.LayerNorm(size.dim, bias=False)
        self.up = nn.Linear(size.dim, hidden, bias=False)
        self.down = nn.Linear(hidden, size.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x_BTD)).split(x_BTD.shape[-1], dim=2)
        q_BNTH, k_BNTH, v_BNTH = (x.unflatten(2, (self.heads, -1)).transpose(1, 2) for x in qkv)
        out_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True)
        x_BTD = x_BTD + self.out(out_BNTH.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.ffn_norm(x_BTD))))


class NanoGPT(nn.Module):
    """GPT-2 without biases: learned positions, output weights tied to the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocab, size.dim)
        self.positions = nn.Embedding(size.tokens, size.dim)
        self.blocks = nn.ModuleList(NanoBlock(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.dim, bias=False)
        for weight in self.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        index_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.tokens(tokens_BT) + self.positions(index_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits = F.linear(self.norm(x_BTD), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten(), ignore_index=-1)


def train_nanogpt(work: Work, turn: Turn) -> None:
    """Trains as nanoGPT's loop does: AdamW, fused on a GPU only, gradients clipped, the next batch read early."""
    model = NanoGPT(work.of).to(work.device)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-4,
        betas=(0.9, 0.95),
        fused=work.device == "cuda" or None,
    )
    forward = torch.compile(model) if work.compile else model
    batches = (rows.pin_memory() if work.device == "cuda" else rows for rows in work.batches())
    rows = next(batches).to(work.device)
    while True:
        turn()
        with work.autocast():
            loss = forward(rows[:, :-1], rows[:, 1:])
        rows = next(batches).to(work.device, non_blocking=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


# ---------------------------------------------------------------- Hugging Face's Trainer


def train_hf(work: Work, turn: Turn) -> None:
    """Trains transformers' Llama with transformers' Trainer."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Turns(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turn()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turn()

    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            for rows in work.batches():
                yield from ({"input_ids": row[:-1], "labels": row[:-1]} for row in rows)  # the model shifts targets

    size = work.of
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=size.dim,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            intermediate_size=size.hidden,
            vocab_size=size.vocab,
            max_position_embeddings=size.tokens,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=size.rows,
            max_steps=MANY_STEPS,
            learning_rate=1e-4,
            use_cpu=work.device == "cpu",
            bf16=work.is_bf16,
            torch_compile=work.compile,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=[Turns()]).train()


# ---------------------------------------------------------------- litgpt


def train_litgpt(work: Work, turn: Turn) -> None:
    """Trains with litgpt's pretraining command; it always compiles, so eager replaces torch.compile."""
    from litgpt import Config, pretrain
    from litgpt.args import EvalArgs, LogArgs, TrainArgs
    from litgpt.data import DataModule

    size = work.of

    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[Tensor]:
            for rows in work.batches():
                turn()
                yield rows

    class Data(DataModule):
        def connect(self, *_: Any, **__: Any) -> None: ...

        def train_dataloader(self) -> torch.utils.data.DataLoader:
            return torch.utils.data.DataLoader(Rows(), batch_size=None)

        def val_dataloader(self) -> torch.utils.data.DataLoader:
            return torch.utils.data.DataLoader([next(work.batches())], batch_size=None)  # required

    config = Config(
        block_size=size.tokens, n_layer=size.layers, n_embd=size.dim, n_head=size.heads, vocab_size=size.vocab,
        padded_vocab_size=size.vocab, rotary_percentage=1.0, parallel_residual=False, bias=False,
        norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", intermediate_size=size.hidden,
    )  # fmt: skip
    if not work.compile:
        torch.compile = lambda model: model
    with tempfile.TemporaryDirectory() as folder:
        pretrain.setup(
            "pythia-14m",
            model_config=config,
            out_dir=Path(folder),
            precision="bf16-mixed" if work.is_bf16 else "32-true",
            data=Data(),
            train=TrainArgs(
                save_interval=None, log_interval=MANY_STEPS, global_batch_size=size.rows, micro_batch_size=size.rows,
                max_tokens=MANY_STEPS * size.rows * size.tokens, max_norm=1.0, min_lr=1e-5, lr_warmup_steps=10,
            ),
            eval=EvalArgs(interval=MANY_STEPS, max_iters=1),
            log=LogArgs(),
            devices=1,
            logger_name="csv",
        )  # fmt: skip


# ---------------------------------------------------------------- torchtitan 0.2.2


def train_torchtitan(work: Work, turn: Turn) -> None:
    """Trains with torchtitan's Trainer; on a CPU without its memory statistics and kernels, which need a GPU."""
    if work.device == "cpu":
        _adapt_torchtitan_to_cpu()
    from torchtitan import train
    from torchtitan.config import ConfigManager
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.protocols import train_spec

    size = work.of
    spec = train_spec.get_train_spec("llama3")
    spec.model_args["peers"] = TransformerModelArgs(
        dim=size.dim, n_layers=size.layers, n_heads=size.heads, vocab_size=size.vocab, multiple_of=min(256, size.dim),
        max_seq_len=size.tokens,
    )  # fmt: skip

    class Rows:
        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            for rows in work.batches():
                turn()
                yield {"input": rows[:, :-1]}, rows[:, 1:]

    spec.build_tokenizer_fn, spec.build_dataloader_fn = None, lambda **_: Rows()
    train_spec.get_train_spec = lambda _: spec
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "job.dump_folder": folder, "model.flavor": "peers", "training.steps": MANY_STEPS,
            "training.local_batch_size": size.rows, "training.seq_len": size.tokens, "optimizer.lr": 1e-4,
            "training.mixed_precision_param": work.dtype, "activation_checkpoint.mode": "none",
            "metrics.log_freq": MANY_STEPS,
        }  # fmt: skip
        argv = [f"--{key}={value}" for key, value in options.items()]
        train.Trainer(ConfigManager().parse_args([*argv, *(["--compile.enable"] if work.compile else [])])).train()


def _adapt_torchtitan_to_cpu() -> None:
    sys.modules["torchtitan.models.moe.kernels"] = SimpleNamespace(generate_permute_indices=None)  # needs Triton
    torch._utils._get_available_device_type = lambda: "cpu"  # None without a GPU, which it takes for CUDA
    torch.cpu.get_device_name = lambda _: "cpu"
    torch.cpu.get_device_properties = lambda _: SimpleNamespace(total_memory=1)
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
    torch.cpu.memory_stats = lambda _: {}
    torch.cpu.current_device = lambda: 0


PROGRAMS: dict[str, Callable[[Work, Turn], None]] = {
    "ours": train_ours,
    "products": multiply,
    "plain loop": train_plain_loop,
    "nanoGPT": train_nanogpt,
    "HF Trainer": train_hf,
    "litgpt": train_litgpt,
    "torchtitan": train_torchtitan,
}


def _linear_flops(x_shape: torch.Size, weight_shape: torch.Size, *_: object, **__: object) -> int:
    return 2 * x_shape.numel() * weight_shape[0]


def _add_product_flops(_: torch.Size, x_shape: torch.Size, weight_shape: torch.Size, **__: object) -> int:
    return _linear_flops(x_shape, weight_shape)


def _addmm_flops(_: torch.Size, a_shape: torch.Size, b_shape: torch.Size, *__: object, **___: object) -> int:
    return 2 * a_shape.numel() * b_shape[1]


def _count_parameters() -> int:
    """Returns how many parameters this process's optimizers have."""
    optimizers = [item for item in gc.get_objects() if isinstance(item, torch.optim.Optimizer)]
    parameters = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return sum(p.numel() for p in parameters)


def count_flops(turn: Turn) -> Turn:
    """Returns a turn() that counts the products of the second step and prints them, with the number of parameters."""
    from torch.utils.flop_counter import FlopCounterMode

    from torchtitan_clone.ops import layers  # noqa: F401, registers operators

    ours = torch.ops.torchtitan_clone
    formulas = {
        ours.faster_linear: _linear_flops,
        ours.add_product_: _add_product_flops,
        torch.ops.aten.addmm_: _addmm_flops,
        torch.ops.aten.addmm: _addmm_flops,  # torch's formula does not take the overload with a dtype
    }
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    turns = itertools.count()

    @functools.wraps(turn)
    def counting_turn() -> None:
        number = next(turns)
        if number == 2:
            counter.__exit__(None, None, None)
            products = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, *formulas}
            counts = counter.get_flop_counts()["Global"]
            sys.stderr.write(f"flops {sum(flops for op, flops in counts.items() if op in products)}\n")
            sys.stderr.write(f"parameters {_count_parameters()}\n")
        turn()
        if number == 1:
            counter.__enter__()

    return counting_turn


if __name__ == "__main__":
    name, options = sys.argv[1], json.loads(sys.argv[2])
    counts_flops = options.pop("count_flops", False)
    work = Work(**options)
    if work.device == "cpu":
        use_tensor_region()
    served = serve_turns()
    with contextlib.suppress(KeyboardInterrupt):
        PROGRAMS[name](work, count_flops(served) if counts_flops else served)
