"""Whether a parallel run computes what one device computes: losses, gradients and weights, side by side.

The reference is nothing but torch: whole model, whole batch, whole logits. The parallel run is the trainer itself.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from torchtitan_clone.config import load_config
from torchtitan_clone.optim import build_schedule
from torchtitan_clone.parallel.init_weights import init_weights
from torchtitan_clone.parallel.runtime import Launch, process_group
from torchtitan_clone.run import preflight
from torchtitan_clone.run.stopping import StopRequest
from torchtitan_clone.testing.harness import run_ranks
from torchtitan_clone.testing.runs import options, rows
from torchtitan_clone.trainer import Trainer

CPU = torch.device("cpu")
STEPS = 5
# Eight rows a step, so that every data degree up to 8 and several micro-batches divide them.
COMMON = {
    "training__steps": STEPS, "training__seq_len": 64, "training__global_batch_size": 8, "training__max_norm": 1e9,
    "training__loss_chunk_tokens": 48, "checkpoint__enable": False, "optimizer__lr": 1e-3,
    "activation_checkpoint__mode": "none",
}  # fmt: skip
# What changes the mathematics; everything else must not.
MATHEMATICS = ("model", "training__document_masking", "training__seq_len", "training__global_batch_size", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Largest relative differences from one device: of losses, of gradients in step 1, of weights at the end."""

    loss: float
    gradient: float
    weight: float

    @property
    def is_parity(self) -> bool:
        """Losses to 1e-5, gradients and weights to 1e-4."""
        return self.loss <= 1e-5 and self.gradient <= 1e-4 and self.weight <= 1e-4


def compare(corpus, folder, *, world_size: int, references: dict, **changes) -> Difference:
    """Trains on one device and on `world_size` ranks with `changes`; references are computed once and kept."""
    mathematics = {key: value for key, value in changes.items() if key.startswith(MATHEMATICS)}
    key = tuple(sorted(mathematics.items()))
    if key not in references:
        argv = options(corpus, folder / "one", **{**COMMON, **mathematics, "training__local_batch_size": 1})
        references[key] = run_ranks(train_plainly, 1, argv)[0]
    argv = options(corpus, folder / "many", **{**COMMON, **changes})
    answers = run_ranks(train_in_parallel, world_size, argv, timeout=300)
    gradients, weights = ({k: v for answer in answers for k, v in answer[part].items()} for part in range(2))
    losses = [row["loss"] for row in rows(folder / "many") if "loss" in row]
    expected_losses, expected_gradients, expected_weights = references[key]
    assert len(losses) == STEPS
    return Difference(
        loss=max(abs(a / b - 1) for a, b in zip(losses, expected_losses, strict=True)),
        gradient=largest_difference(gradients, expected_gradients),
        weight=largest_difference(weights, expected_weights),
    )


def largest_difference(found: dict, expected: dict) -> float:
    """Over all tensors: norm of the difference over norm."""
    assert set(found) == set(expected), set(found) ^ set(expected)
    return max(((found[name] - value).norm() / value.norm()).item() for name, value in expected.items())


def train_plainly(argv):
    """Losses of all steps, gradients of the first, weights at the end."""
    config = load_config(argv)
    plan = preflight.resolve(config, world_size=1, device_type="cpu")
    loader = preflight.prepare(plan, launch=Launch.from_environment()).loader
    model = plan.spec.build(plan.model_args)
    parameters = dict(model.named_parameters())
    init_weights(parameters, seed=config.debug.seed, std_of=lambda name: plan.spec.initial_std(plan.model_args, name))
    groups: list[dict] = [{"params": [p for p in parameters.values() if p.ndim >= 2]}]
    groups.append({"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0})
    betas = (config.optimizer.beta1, config.optimizer.beta2)
    optimizer = torch.optim.AdamW(groups, betas=betas, weight_decay=config.optimizer.weight_decay)
    lr_factor = build_schedule(config.lr_scheduler, steps=STEPS)
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    for step in range(1, STEPS + 1):
        batch = next(loader)
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.lr * lr_factor(step)
        logits = model(batch.tokens_BT, positions_BT=batch.positions_BT, documents_BT=batch.documents_BT)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten())
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {name: p.grad.clone() for name, p in parameters.items()}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, {name: p.detach() for name, p in parameters.items()}


def train_in_parallel(argv):
    """This rank's gradients of the first step and weights at the end, each whole."""
    config, launch = load_config(argv), Launch.from_environment()
    plan = preflight.resolve(config, world_size=launch.world_size, device_type="cpu")
    run = preflight.prepare(plan, launch=launch)
    gradients = {}
    with process_group(config.comm, launch=launch, device=CPU):
        trainer = Trainer(run, launch=launch, device=CPU, stop=StopRequest())

        def keep_gradients(optimizer, args, kwargs):
            if not gradients:
                gradients.update({name: full_tensor(p.grad).clone() for name, p in trainer.parameters.items()})

        trainer.optimizer.torch_optimizers[config.optimizer.name].register_step_pre_hook(keep_gradients)
        trainer.train()
        return gradients, {name: full_tensor(p.detach()) for name, p in trainer.parameters.items()}


def full_tensor(tensor) -> torch.Tensor:
    """Returns the global tensor of a DTensor; a collective."""
    return tensor.full_tensor()
