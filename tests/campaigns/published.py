"""Compares predicted memory with what torchtitan published for its runs on H100 and H200.

    python tests/campaigns/published.py
    python tests/campaigns/published.py --only=8B

Predicted is our model with the batch, the recomputation, the number of micro-batches and the loss of theirs: all logits
at once, in fp32, or where they compiled the loss in bfloat16 only. Their blocks were compiled in all rows but two; the
prediction is that of eager execution without float8. It is made for both kinds of segments of the allocator: their
launcher sets expandable_segments, their Slurm script does not, and the tables do not tell. Their numbers are
max_memory_reserved, of the fullest GPU.

Sources, in github.com/pytorch/torchtitan at v0.2.2: benchmarks/llama3_h100_202412_torchtitan.md (tables 1 to 6, run at
9dec370) and benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md ("H200").
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone without being installed

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from torchtitan_clone.config import load_config
from torchtitan_clone.ops.vocabulary import local_shards
from torchtitan_clone.parallel.forward_backward import LossFn
from torchtitan_clone.planner.cuda_allocator import replay
from torchtitan_clone.planner.step_memory import trace_steps
from torchtitan_clone.run import preflight


class _FusedCrossEntropy(torch.autograd.Function):
    """Allocates what the compiled cross-entropy does: the gradient by the logits in their type, nothing in fp32."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        ctx.save_for_backward(logits_NV)
        return logits_NV.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(*ctx.saved_tensors), None


def _logits(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
    """Returns logits [B T, V], sharded over the vocabulary like the weight."""
    hidden_BTD, local_VD, _ = local_shards(hidden_BTD, weight_VD)
    logits_NV = F.linear(hidden_BTD, local_VD).flatten(0, 1)
    if not isinstance(weight_VD, DTensor):
        return logits_NV
    return DTensor.from_local(logits_NV, weight_VD.device_mesh, [Shard(1)], run_check=False)


def plain_loss(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> Tensor:
    """Returns the cross-entropy of all logits, as torchtitan computes it."""
    loss = F.cross_entropy(_logits(hidden_BTD, weight_VD).float(), targets_BT.flatten(), reduction="sum")
    return loss.to_local() if isinstance(loss, DTensor) else loss


def fused_loss(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> Tensor:
    """Returns a loss that needs the memory of the same when compiled."""
    return _FusedCrossEntropy.apply(_logits(hidden_BTD, weight_VD), targets_BT)


@dataclass(frozen=True, kw_only=True)
class Published:
    """A run and the GiB that torch reserved on its fullest GPU."""

    name: str
    gpus: int
    options: Mapping[str, object]
    gib: float
    source: str
    loss_fn: LossFn = plain_loss


TP8: dict[str, Any] = {"tensor_parallel_degree": 8}
PP8: dict[str, Any] = {**TP8, "pipeline_parallel_degree": 8}
ONE_F_ONE_B: dict[str, Any] = {**PP8, "pipeline_parallel_schedule": "1F1B"}
INTERLEAVED: dict[str, Any] = {**PP8, "pipeline_parallel_schedule": "Interleaved1F1B"}


def options_of(
    flavor: str, *, rows: int, seq_len: int = 8192, mode: str = "full", **parallelism: str | int
) -> dict[str, object]:
    """Returns the options of a run; `rows` is the local batch size, `mode` that of recomputation."""
    return {
        "model.name": "llama3", "model.flavor": flavor, "model.args.vocab_size": 128256,
        "model.args.max_seq_len": seq_len, "training.local_batch_size": rows, "training.seq_len": seq_len,
        "training.document_masking": "false",
        "activation_checkpoint.mode": mode, "activation_checkpoint.selective_ac_option": "op",
        **{f"parallelism.{key}": value for key, value in parallelism.items()},
    }  # fmt: skip


def _of_8b() -> list[Published]:
    options = options_of("8B", rows=2, mode="selective")
    found = [
        Published(name=f"8B, selective{kind}", gpus=gpus, options=options, gib=gib, source=f"table {table}")
        for gpus, table, sizes in ((8, 1, (82.4, 77.0, 76.8)), (128, 3, (67.0, 62.0, 61.8)))
        for kind, gib in zip(("", ", compiled", ", float8"), sizes, strict=True)
    ]
    h200 = [
        Published(name="8B, selective, float8, loss compiled", gpus=gpus, options=options, gib=gib, source="H200",
                  loss_fn=fused_loss)
        for gpus, gib in ((32, 47.96), (64, 46.97))
    ]  # fmt: skip
    return [*found, *h200]


def _long(flavor: str, *, gpus: int, rows: int, sizes: Sequence[float], table: int, **others: Any) -> list[Published]:
    return [
        Published(
            name=f"{flavor}, full, {32 * cp} Ki tokens, context {cp}", gpus=gpus, gib=gib, source=f"table {table}",
            options=options_of(flavor, rows=rows, seq_len=32768 * cp, context_parallel_degree=cp, **others),
        )
        for cp, gib in zip((1, 2, 4, 8), sizes, strict=True)
    ]  # fmt: skip


# Their default is as many micro-batches as pipeline ranks.
ROWS = [
    *_of_8b(),
    *_long("8B", gpus=8, rows=1, sizes=(83.9, 84.2, 84.0, 84.5), table=2),
    *(
        Published(
            name=f"70B, full{kind}", gpus=256, options=options_of("70B", rows=16, **TP8), gib=gib, source="table 4"
        )
        for kind, gib in (("", 71.9), (", asynchronous tensor", 67.6))
    ),
    *(
        Published(
            name=f"405B, full, {schedule['pipeline_parallel_schedule']}", gpus=512, gib=gib, source="table 5",
            options=options_of("405B", rows=32, pipeline_parallel_microbatch_size=size, **schedule),
        )
        for schedule, size, gib in ((ONE_F_ONE_B, 4, 82.5), (INTERLEAVED, 4, 72.7))
    ),
    *_long("405B", gpus=512, rows=8, sizes=(75.3, 75.9, 77.1, 84.9), table=6, **ONE_F_ONE_B),
]  # fmt: skip


def predicted_gib(row: Published) -> tuple[float, float]:
    """Returns the predicted memory without and with expandable segments.

    Of a pipeline that of the first rank, with most micro-batches in flight, or that of the last one, with the loss.
    """
    argv = [f"--{key}={value}" for key, value in row.options.items()]
    plan = preflight.resolve(load_config(argv), world_size=row.gpus, device_type="cuda")
    with loss_parallel():
        traces = [trace_steps(plan, pipeline_rank=rank, loss_fn=row.loss_fn) for rank in {0, plan.degrees.pp - 1}]
    fixed, expandable = (
        max(replay(events, expandable=choice).reserved / 2**30 for events in traces) for choice in (False, True)
    )
    return fixed, expandable


def main() -> int:
    """Prints the rows, and how many are within 10 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows with this text in their name or source")
    chosen = parser.parse_args().only
    rows = [row for row in ROWS if chosen in row.name or chosen in row.source]
    kinds = ("fixed segments", "expandable segments")
    print(f"{'run':40}{'GPUs':>5}  {'source':9}{'published':>10}{kinds[0]:>18}{kinds[1]:>22}{'CPU s':>8}")
    errors: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
    for row in rows:
        start = time.process_time()
        sizes = predicted_gib(row)
        for kind, size in zip(kinds, sizes, strict=True):
            errors[kind][f"{row.name} on {row.gpus} GPUs"] = size / row.gib - 1
        fixed, expandable = (f"{size:10.1f}{size / row.gib - 1:+8.1%}" for size in sizes)
        seconds = time.process_time() - start
        print(
            f"{row.name:40}{row.gpus:5}  {row.source:9}{row.gib:10.1f}{fixed}{expandable:>22}{seconds:8.1f}", flush=True
        )
    for kind, found in errors.items():
        worst = max(found, key=lambda name: abs(found[name]))
        within = sum(abs(error) <= 0.1 for error in found.values())
        print(f"{kind}: {within} of {len(found)} within 10 %; worst: {worst}, {found[worst]:+.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
