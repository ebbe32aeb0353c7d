"""Auxiliary terms of a model beside its loss: values and gradients equal those of one device."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.marks import needs_split_backward
from tests.support.harness import run_ranks
from torchtitan_clone.config import Degrees
from torchtitan_clone.config.schema import Comm, Parallelism
from torchtitan_clone.ops.attention import OnHost
from torchtitan_clone.parallel.forward_backward import build_forward_backward
from torchtitan_clone.parallel.mesh import build_mesh
from torchtitan_clone.parallel.runtime import Launch, process_group
from torchtitan_clone.parallel.stages import resolved_stages

CPU = torch.device("cpu")
DIM, VOCABULARY, EXPERTS, LAYERS, ROWS, TOKENS = 8, 13, 3, 4, 8, 6
TERMS = {"balance": 0.3, "z": 0.02}


class RoutedBlock(nn.Module):
    """A linear layer whose router returns two sums over tokens [2]; without a router it returns hidden states only."""

    def __init__(self, *, is_routed):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.router = nn.Linear(DIM, EXPERTS) if is_routed else None

    def forward(self, h_BTD):
        out_BTD = h_BTD + self.linear(h_BTD).tanh()
        if self.router is None:
            return out_BTD
        logits_BTE = self.router(h_BTD)
        probs_BTE = logits_BTE.softmax(-1)
        sums_A = torch.stack([probs_BTE.square().sum(), logits_BTE.logsumexp(-1).square().sum()])
        return out_BTD * probs_BTE.amax(-1, keepdim=True), sums_A


class RoutedDecoder(nn.Module):
    """Follows the contract of a decoder with auxiliary terms; the first and the third block have no router."""

    def __init__(self, auxiliary):
        super().__init__()
        torch.manual_seed(0)
        self.auxiliary = auxiliary
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleDict({str(i): RoutedBlock(is_routed=i % 2 == 1) for i in range(LAYERS)})
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens_BT, sums_A=None, *, positions_BT, documents_BT, targets_BT=None, loss_fn=None, **_):
        assert torch.equal(documents_BT.tensor, positions_BT)  # of the same micro-batch, and not a tensor itself
        h_BTD = tokens_BT if self.tok_embeddings is None else self.tok_embeddings(tokens_BT)
        if self.auxiliary and sums_A is None:
            sums_A = torch.zeros(len(self.auxiliary))
        for block in self.layers.values():
            h_BTD = block(h_BTD)
            if isinstance(h_BTD, tuple):
                h_BTD, block_sums_A = h_BTD
                sums_A = sums_A + block_sums_A if self.auxiliary else None
        if self.output is None:
            return (h_BTD, sums_A) if self.auxiliary else h_BTD
        loss = loss_fn(self.norm(h_BTD), self.output.weight, targets_BT)
        return torch.cat((loss[None], sums_A)) if self.auxiliary else loss

    def keep(self, names):
        """Removes the modules of other stages."""
        for name in {"tok_embeddings", "norm", "output"} - set(names):
            setattr(self, name, None)
        for name in [name for name in self.layers if f"layers.{name}" not in names]:
            del self.layers[name]
        return self


def loss_sum(hidden_BTD, weight_VD, targets_BT):
    return F.cross_entropy((hidden_BTD @ weight_VD.T).flatten(0, 1), targets_BT.flatten(), reduction="sum")


def batch(first, last):
    tokens_BT = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))[first:last]
    return SimpleNamespace(
        tokens_BT=tokens_BT,
        targets_BT=tokens_BT.roll(1, 1),
        positions_BT=tokens_BT,
        documents_BT=tokens_BT.clone(),
        mtp_targets_BKT=None,
        is_context_BKT=None,
        groups_BT=None,
    )


STEPS = 3
"""torch keeps buffers and gradients of inputs between steps, so that one step shows too little."""


def outcome(step, parameters, microbatches):
    """Loss and terms of the last of some equal steps and of one without gradients, and the gradients of the last."""
    for _ in range(STEPS):
        for parameter in parameters.values():
            parameter.grad = None
        output = step(microbatches, num_targets=ROWS * TOKENS)
    with torch.no_grad():
        validation = step(microbatches, num_targets=ROWS * TOKENS)
    values = [{"loss": found.loss, **found.auxiliary} for found in (output, validation)]
    gradients = {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in parameters.items()}
    return [{name: value.item() for name, value in found.items()} for found in values], gradients


def on_one_device(auxiliary):
    """Returns the same in plain PyTorch: one backward of the weighted sum."""
    model, rows = RoutedDecoder(auxiliary), batch(0, ROWS)
    documents_BT = OnHost(rows.documents_BT)
    given = {"positions_BT": rows.positions_BT, "documents_BT": documents_BT, "targets_BT": rows.targets_BT}
    out = model(rows.tokens_BT, **given, loss_fn=loss_sum) / (ROWS * TOKENS)
    (out @ torch.tensor([1.0, *auxiliary.values()]) if auxiliary else out).backward()
    values = dict(zip(["loss", *auxiliary], out.flatten().tolist(), strict=True))
    return values, {name: p.grad for name, p in model.named_parameters()}


def on_data_ranks(auxiliary):
    launch = Launch.from_environment()
    with process_group(Comm(), launch=launch, device=CPU):
        degrees = Degrees(pp=1, dp_replicate=1, dp_shard=2, cp=1, tp=1)
        model = RoutedDecoder(auxiliary)
        fully_shard(model, mesh=build_mesh(degrees, loss_rank=0, device_type="cpu").fsdp)
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
        step = build_forward_backward(model, loss_fn=loss_sum, device=CPU)
        first = launch.rank * ROWS // 2
        microbatches = [batch(first, first + 2), batch(first + 2, first + 4)]
        return outcome(step, dict(model.named_parameters()), microbatches)


def on_pipeline_ranks(auxiliary, schedule, frozen_stages):
    from torchtitan_clone.parallel.pipeline import build_pipelined_forward_backward

    launch = Launch.from_environment()
    parallelism = Parallelism(
        pipeline_parallel_degree=2,
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_first_stage_less_layers=0,
        pipeline_parallel_last_stage_less_layers=0,
    )
    stages = resolved_stages(parallelism, n_layers=LAYERS)
    with process_group(Comm(), launch=launch, device=CPU):
        degrees = Degrees(pp=2, dp_replicate=1, dp_shard=1, cp=1, tp=1)
        mesh = build_mesh(degrees, loss_rank=stages.ranks[-1], device_type="cpu")
        own = stages.of_rank(mesh.pp.get_local_rank())
        parts = [RoutedDecoder(auxiliary).keep(stages.modules[stage]) for stage in own]
        for stage, part in zip(own, parts, strict=True):
            part.requires_grad_(stage >= frozen_stages)
        step = build_pipelined_forward_backward(
            parts,
            stages=stages,
            frozen_stages=frozen_stages,
            parallelism=parallelism,
            mesh=mesh,
            loss_fn=loss_sum,
            dim=DIM,
            dtype=torch.float32,
            device=CPU,
        )
        parameters = {name: p for part in parts for name, p in part.named_parameters() if p.requires_grad}
        return outcome(step, parameters, [batch(0, ROWS // 2), batch(ROWS // 2, ROWS)])


def check(answers, auxiliary, *, is_frozen=lambda _name: False):
    expected, gradients = run_ranks(on_one_device, 1, auxiliary)[0]
    found = {}
    for index in range(2):  # training and validation
        for name, value in expected.items():
            assert sum(values[index][name] for values, _ in answers) == pytest.approx(value, rel=1e-5), (index, name)
        assert all(values[index].keys() == expected.keys() for values, _ in answers)
    for _, own in answers:
        found |= own
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6, msg=name)
    assert set(found) == {name for name in gradients if not is_frozen(name)}


@pytest.mark.parametrize("auxiliary", [{}, TERMS], ids=["loss", "terms"])
def test_data_parallel_equals_one_device(auxiliary):
    check(run_ranks(on_data_ranks, 2, auxiliary), auxiliary)


SPLIT = [
    pytest.param(name, marks=needs_split_backward) for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
]
SCHEDULES = ["1F1B", "GPipe", "LoopedBFS", "Interleaved1F1B", *SPLIT]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("auxiliary", [{}, TERMS], ids=["loss", "terms"])
def test_pipeline_equals_one_device(schedule, auxiliary):
    check(run_ranks(on_pipeline_ranks, 2, auxiliary, schedule, 0), auxiliary)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", SPLIT[1]])
def test_frozen_stages_leave_terms_and_other_gradients_as_they_are(schedule):
    answers = run_ranks(on_pipeline_ranks, 2, TERMS, schedule, 1)
    frozen = ("tok", "layers.0", "layers.1") if schedule == "1F1B" else ("tok", "layers.0")
    check(answers, TERMS, is_frozen=lambda name: name.startswith(frozen))
