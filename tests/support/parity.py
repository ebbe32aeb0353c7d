"""A parallel run must compute what one device computes: losses, gradient norms, gradients and weights are compared.

The reference is `PlainLoop`, plain PyTorch: one model, full batches, logits not chunked. The parallel
run is the trainer itself.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from tests.support.harness import run_ranks
from tests.support.plain_loop import PlainLoop
from tests.support.runs import options, rows
from tests.support.sabotage import MISTAKES
from tests.support.teachers import write_predictions, write_teacher
from tests.support.trainers import full_copies, open_trainers
from torchtitan_clone.models.decoder import named_state
from torchtitan_clone.trainer import Trainer

STEPS = 3  # with gradients of weights that were trained, and with a momentum
# Eight rows a step, so that every data degree up to 8 and several micro-batches divide them.
COMMON: dict[str, object] = {
    "training__steps": STEPS, "training__seq_len": 64, "training__global_batch_size": 8, "training__max_norm": 1e9,
    "training__loss_chunk_tokens": 48, "checkpoint__enable": False, "optimizer__lr": 1e-3,
    "parallelism__fsdp_blocks_per_group": 1,
}  # fmt: skip
# Options that change the mathematics; no other option may.
MATHEMATICS = (
    "model", "optimizer", "training__document_masking", "training__seq_len", "training__global_batch_size",
    "training__max_norm", "training__z_loss", "ema", "debug__moe_force_load_balance", "data__packing", "distillation",
)  # fmt: skip
WITH_TEACHER = ("distillation__teacher_path", "distillation__store")
"""Options whose value is the name of a folder beside the corpus; the teacher is in "teacher"."""
Mathematics = tuple[tuple[str, object], ...]
"""Options that change the mathematics."""
References = dict[Mathematics, "Reference"]
Trained = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Gradients and weights by name."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one device computes."""

    losses: list[float]
    """Of each step, and after it those of the depths of multi-token prediction and of indexers, the teacher's
    divergence, z-loss and the largest logit."""
    grad_norms: list[float]
    gradients: dict[str, Tensor]
    """Of step 1, after clipping."""
    weights: dict[str, Tensor]
    """After the last step, with the biases of routers; averages as "ema/NAME"."""
    without_gradient: frozenset[str]
    """Names of parameters that change no result: what they have for a gradient is rounding."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Largest relative differences from one device."""

    loss: float
    grad_norm: float
    gradient: float
    weight: float

    @property
    def is_parity(self) -> bool:
        """Whether losses agree to 1e-5, and gradient norms, gradients and weights to 1e-4."""
        return self.loss <= 1e-5 and all(each <= 1e-4 for each in (self.grad_norm, self.gradient, self.weight))


def compare(
    corpus: Path,
    folder: Path,
    cases: Sequence[Mapping[str, object]],
    *,
    world_size: int,
    references: References,
    mistake: str | None = None,
) -> list[Difference]:
    """Trains each case on one device, and on `world_size` ranks, which do so one after another in the same processes.

    `references` caches the results of one device. `mistake`: key of sabotage.MISTAKES that the ranks make.
    """
    cases = [_with_teacher(changes, corpus=corpus) for changes in cases]
    mathematics = [_mathematics_of(changes) for changes in cases]
    missing = [key for key in dict.fromkeys(mathematics) if key not in references]
    plain = [
        options(corpus, folder / "one", **{**COMMON, **dict(key), "training__local_batch_size": 1}) for key in missing
    ]
    references.update(zip(missing, run_ranks(train_plainly, 1, plain)[0] if plain else [], strict=True))
    folders = [folder / str(number) for number in range(len(cases))]
    runs = [options(corpus, each, **{**COMMON, **changes}) for each, changes in zip(folders, cases, strict=True)]
    answers = run_ranks(train_in_parallel, world_size, runs, mistake, timeout=300)
    return [
        _difference(answer, references[key], folder=each)
        for *answer, key, each in zip(*answers, mathematics, folders, strict=True)
    ]


def _with_teacher(changes: Mapping[str, object], *, corpus: Path) -> Mapping[str, object]:
    """Returns the options with the folder of the teacher, which is made with the first case that has one."""
    found = {name: corpus.parent / str(changes[name]) for name in WITH_TEACHER if changes.get(name)}
    if found and not (teacher := corpus.parent / "teacher").exists():
        write_teacher(teacher, corpus)
    changes = {**changes, **found}
    if "distillation__store" in found and not found["distillation__store"].exists():
        argv = options(corpus, corpus.parent / "stored", **{**COMMON, **dict(_mathematics_of(changes))})
        run_ranks(write_predictions, 1, argv, corpus.parent / "teacher", timeout=120)
    return changes


def _mathematics_of(changes: Mapping[str, object]) -> Mathematics:
    return tuple(sorted((key, value) for key, value in changes.items() if key.startswith(MATHEMATICS)))


def _difference(answers: Sequence[Trained], expected: Reference, *, folder: Path) -> Difference:
    """Returns how far what all ranks trained is from the reference; `folder` has the logged metrics."""
    gradients, weights = (
        [{name: x for name, x in found.items() if name not in expected.without_gradient} for found in of_ranks]
        for of_ranks in zip(*answers, strict=True)
    )
    logged = [row for row in rows(folder) if "loss" in row]
    assert len(logged) == STEPS
    terms_of_loss = ("mtp_loss", "indexer_kl", "distillation_kl", "output_z")
    wanted = [*(f"auxiliary/{name}" for name in terms_of_loss), "attention/max_logit"]
    terms = [name for prefix in wanted for name in logged[0] if name.startswith(prefix)]
    losses = [row[name] for row in logged for name in ("loss", *terms)]
    return Difference(
        loss=relative_difference(losses, expected.losses),
        grad_norm=relative_difference([row["grad_norm"] for row in logged], expected.grad_norms),
        gradient=largest_difference(gradients, expected.gradients),
        weight=largest_difference(weights, expected.weights),
    )


def relative_difference(found: Sequence[float | None], expected: list[float]) -> float:
    """Returns the largest relative difference of two lists of numbers; NaN if one is NaN, or None as in metrics."""
    return _largest([math.nan if a is None else abs(a / b - 1) for a, b in zip(found, expected, strict=True)])


def largest_difference(found_by_rank: Sequence[dict[str, Tensor]], expected: dict[str, Tensor]) -> float:
    """Returns the largest norm of a difference over the norm of what is expected, of all tensors of all ranks."""
    names = {name for found in found_by_rank for name in found}
    assert names == set(expected), names ^ set(expected)
    differences = [(value - expected[name]).norm() for found in found_by_rank for name, value in found.items()]
    norms = [expected[name].norm() for found in found_by_rank for name in found]
    return _largest([(a / b).item() for a, b in zip(differences, norms, strict=True)])


def _largest(numbers: list[float]) -> float:
    # max() would return another number than NaN, depending on their order.
    return torch.tensor(numbers, dtype=torch.float64).max().item()


def train_plainly(runs: Sequence[list[str]]) -> list[Reference]:
    """Trains all steps of each run on one device with plain PyTorch."""
    return [_train_plainly(argv) for argv in runs]


def _train_plainly(argv: list[str]) -> Reference:
    loop = PlainLoop(argv)
    gradients: dict[str, Tensor] = {}

    def keep_gradients(*_: object) -> None:
        if not gradients:
            gradients.update({name: p.grad.clone() for name, p in loop.parameters.items() if p.grad is not None})

    loop.optimizers[0].register_step_pre_hook(keep_gradients)
    losses, grad_norms = [], []
    for step in range(1, STEPS + 1):
        loss, norm = loop.train_step(step)
        losses += [loss, *(each.item() for each in loop.mtp_losses)]
        losses += [loop.indexer_kl.item()] if loop.index_losses else []
        losses += [] if loop.teacher is None else [loop.divergence.item()]
        losses += [loop.output_z.item()] if "--training.z_loss" in " ".join(argv) else []
        losses += [] if loop.qk_clip is None else [max(x.max().item() for x in loop.qk_clip.max_logits.values())]
        grad_norms.append(norm)
    averages = {f"ema/{name}": average.float() for name, average in loop.averages.items()}
    weights = full_copies(named_state(loop.model).items()) | averages
    # Where keys are not rotated, their bias adds the same to all scores of a query.
    args: Any = loop.model.args
    without_gradient = {
        f"layers.{layer}.attention.wk.bias" for layer, kind in enumerate(args.layer_kinds()) if kind.positions is None
    }
    return Reference(
        losses=losses,
        grad_norms=grad_norms,
        gradients={name: x for name, x in gradients.items() if name not in without_gradient},
        weights={name: x for name, x in weights.items() if name not in without_gradient},
        without_gradient=frozenset(without_gradient),
    )


def train_in_parallel(runs: list[list[str]], mistake: str | None = None) -> list[Trained]:
    """Returns the global gradients of step 1 and weights at the end of each run, of the parameters this rank has."""
    if mistake is not None:
        MISTAKES[mistake].plant()
    return [_train_in_parallel(trainer) for trainer in open_trainers(runs)]


def _train_in_parallel(trainer: Trainer) -> Trained:
    gradients: dict[str, Tensor] = {}

    seen = set[Optimizer]()

    def keep_gradients(optimizer: Optimizer, _: object, options: dict[str, Any]) -> None:
        """Keeps the gradients of its parameters, which a step may overwrite, as they are when clipped."""
        if optimizer not in seen:
            seen.add(optimizer)
            own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            found = ((name, p.grad) for name, p in trainer.engine.parameters.items() if p in own)
            factor = options.get("factor", 1.0)
            gradients.update(full_copies((name, grad * factor) for name, grad in found if grad is not None))

    with_hook = register_optimizer_step_pre_hook(keep_gradients)
    trainer.train()
    with_hook.remove()
    averages = {} if trainer.engine.ema is None else trainer.engine.ema.averages()
    weights = trainer.engine.model_tensors() | {f"ema/{name}": average for name, average in averages.items()}
    return gradients, full_copies(weights.items())
