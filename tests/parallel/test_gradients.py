"""Gradients of the parallelized model equal those of plain PyTorch on one device, with uneven numbers of targets.

Tests of gradients.py, apply.py and fsdp.py.
"""

import math
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.profiler import profile

from tests.marks import marked
from tests.support.harness import run_ranks
from tests.support.runs import options
from tests.support.trainers import full_copies
from torchtitan_clone.config import load_config
from torchtitan_clone.config.schema import Comm
from torchtitan_clone.ops import IGNORE_INDEX
from torchtitan_clone.ops.cross_entropy import build_loss
from torchtitan_clone.parallel.apply import named_parameters
from torchtitan_clone.parallel.forward_backward import build_forward_backward
from torchtitan_clone.parallel.gradients import clipping_factor, gradient_norm, norm_dtype, norms_of, sum_over_ranks
from torchtitan_clone.parallel.init_weights import init_weights
from torchtitan_clone.parallel.mesh import batch_rank, build_mesh
from torchtitan_clone.parallel.runtime import Launch, pick_device, process_group
from torchtitan_clone.run import preflight
from torchtitan_clone.run.forward_backward import build_plan_forward_backward
from torchtitan_clone.run.loaders import open_loaders, tokens_of_rank
from torchtitan_clone.run.model_parts import build_model_parts

TIED = {"model__args__tied_embeddings": True}
SELECTIVE_OP = {"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"}


def masked(batch, *, first_row, tokens=None):
    """Returns the batch with a different share of targets masked in every row; the eighth row has none left."""
    tokens = torch.arange(batch.targets_BT.shape[1]) if tokens is None else tokens
    for index, row in enumerate(batch.targets_BT, start=first_row):
        row[tokens < 10 * index] = IGNORE_INDEX
    num_targets = int((batch.targets_BT != IGNORE_INDEX).sum())
    return type(batch)(**{**vars(batch), "num_targets": num_targets})


def add_dropout(parts):
    """Drops a half of what each feed-forward returns."""
    for part in parts:
        for name, module in part.named_modules():
            if name.endswith("feed_forward"):
                module.register_forward_hook(lambda _module, _inputs, output: F.dropout(output, 0.5))
    torch.manual_seed(0)


def test_recomputation_draws_the_random_numbers_of_forward(corpus, tmp_path):
    """As a family with dropout needs; none of this package has random numbers."""
    modes = ({"activation_checkpoint__mode": "none"}, {"activation_checkpoint__mode": "full"}, SELECTIVE_OP)
    runs = [options(corpus, tmp_path, **mode) for mode in modes]
    ((plain, *others),) = run_ranks(partial(parallel_gradients, change=add_dropout), 1, runs)
    for loss, norm, gradients in others:
        assert (loss, norm) == plain[:2]
        assert all(torch.equal(gradient, plain[2][name]) for name, gradient in gradients.items())


def std_of(plan):
    return lambda name: plan.spec.initial_std(plan.model_args, name)


def parallel_gradients(runs, *, change=lambda _: None, **parallelism):
    """Returns loss, gradient norm and gradients of each run as the trainer computes them, in one process group.

    `parallelism` are options that are set behind the rules, which would refuse them.
    """
    launch = Launch.from_environment()
    device = pick_device(launch)
    with process_group(load_config(runs[0]).comm, launch=launch, device=device):
        return [gradients_of(load_config(argv), launch, device, change=change, **parallelism) for argv in runs]


def gradients_of(config, launch, device, *, change, **parallelism):
    plan = preflight.resolve(config, world_size=launch.world_size, device_type=device.type)
    plan = replace(plan, config=replace(config, parallelism=replace(config.parallelism, **parallelism)))
    dataset = preflight.prepare(plan, launch=launch).dataset
    loader, _ = open_loaders(plan, dataset=dataset, rank=launch.rank)
    mesh = build_mesh(plan.degrees, loss_rank=plan.stages.ranks[-1], device_type=device.type)
    parts = build_model_parts(plan, mesh=mesh, device=device)
    change(parts)
    parameters = named_parameters(parts)
    first_row = batch_rank(plan.degrees, rank=launch.rank) * plan.global_batch_size // plan.degrees.data
    tokens = tokens_of_rank(plan, rank=launch.rank)
    batch = masked(next(loader), first_row=first_row, tokens=tokens)
    (num_targets,) = sum_over_ranks([batch.num_targets * mesh.is_loss_leader])
    step = build_plan_forward_backward(parts, plan=plan, mesh=mesh, device=device)
    output = step(batch.microbatches(config.training.local_batch_size), num_targets=int(num_targets))
    gradients = full_copies((name, p.grad) for name, p in parameters.items())
    norm = gradient_norm(parameters.values(), ranks=launch.world_size // plan.degrees.pp)
    (loss,) = sum_over_ranks([output.loss.item() * mesh.is_loss_leader])
    mesh.close()
    return loss, norm.item(), gradients


def plain_gradients(argv):
    """Returns the same, computed by plain PyTorch."""
    config = load_config(argv)
    launch = Launch.from_environment()
    plan = preflight.resolve(config, world_size=1, device_type="cpu")
    dataset = preflight.prepare(plan, launch=launch).dataset
    loader, _ = open_loaders(plan, dataset=dataset, rank=0)
    batch = masked(next(loader), first_row=0)
    model = plan.spec.build(plan.model_args)
    init_weights(dict(model.named_parameters()), seed=config.debug.seed, std_of=std_of(plan))
    logits = model(batch.tokens_BT, positions_BT=batch.positions_BT, documents_BT=batch.documents_BT)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten(), ignore_index=IGNORE_INDEX)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.stack([g.double().norm() for g in gradients.values()]).norm()
    return loss.item(), norm.item(), gradients


@cache
def expected_gradients(argv):
    return run_ranks(plain_gradients, 1, list(argv))[0]


class Runs:
    """Gradients of named runs; the same processes compute those of as many ranks, as soon as one is asked for.

    `argvs`: number of ranks and options of each run.
    """

    def __init__(self, argvs):
        self.argvs = argvs
        self._found = {}

    def __getitem__(self, name):
        """Returns what all ranks compute in a run."""
        world_size, _ = self.argvs[name]
        if name not in self._found:
            runs = {each: argv for each, (ranks, argv) in self.argvs.items() if ranks == world_size}
            answers = run_ranks(parallel_gradients, world_size, list(runs.values()), timeout=300)
            self._found |= zip(runs, zip(*answers, strict=True), strict=True)
        return self._found[name]

    def check(self, name):
        """Compares a run with plain PyTorch."""
        check_gradients(self[name], self.argvs[name][1])


def check_gradients(answers, argv):
    """Compares loss, gradient norm and every gradient of all ranks; a rank may have some layers of the model only."""
    plain = [a for a in argv if not a.startswith(("--job", "--parallelism", "--compile", "--activation"))]
    plain = [a for a in plain if not a.startswith("--training.local_batch_size")] + ["--training.local_batch_size=1"]
    expected_loss, expected_norm, expected = expected_gradients(tuple(plain))
    found = set()
    for loss, norm, gradients in answers:
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-5)
        found |= set(gradients)
        for name, gradient in gradients.items():
            assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
    assert found == set(expected)


MESHES = {
    "accumulate": (1, {"training__local_batch_size": 2}),
    "selective op, first block": (
        1,
        {"training__local_batch_size": 4, "activation_checkpoint__first_blocks": 1, **SELECTIVE_OP},
    ),
    "2 ranks": (2, {"training__local_batch_size": 1}),
    "tp tied uneven": (2, {"parallelism__tensor_parallel_degree": 2, "model__args__vocab_size": 2051, **TIED}),
    # The last micro-batch is a row without targets: it gives no gradient on any rank.
    "context ring, accumulated": (
        2,
        {
            "training__local_batch_size": 1,
            "parallelism__context_parallel_degree": 2,
            "parallelism__context_parallel_rotate_method": "ring",
        },
    ),
    "3 ranks": (3, {"training__local_batch_size": 1, "training__global_batch_size": 6}),
    "hsdp 2x2": (4, {"training__local_batch_size": 1, "parallelism__data_parallel_replicate_degree": 2}),
}
"""One mesh of each way to sum gradients; tests/parallel/test_parity.py has more, with equal numbers of targets."""


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gradients")
    chunks = {"training__loss_chunk_tokens": 48}
    return Runs({name: (n, options(corpus, folder / name, **chunks, **each)) for name, (n, each) in MESHES.items()})


@pytest.mark.parametrize("name", marked(MESHES))
def test_gradients_equal_plain_pytorch(runs, name):
    runs.check(name)


def mixed_precision_types(argv):
    """Types seen by the blocks in forward, and of the parameters and gradients that the optimizer sees."""
    config = load_config(argv)
    launch = Launch.from_environment()
    plan = preflight.resolve(config, world_size=launch.world_size, device_type="cpu")
    dataset = preflight.prepare(plan, launch=launch).dataset
    loader, _ = open_loaders(plan, dataset=dataset, rank=launch.rank)
    with process_group(config.comm, launch=launch, device=torch.device("cpu")):
        mesh = build_mesh(plan.degrees, loss_rank=0, device_type="cpu")
        (model,) = build_model_parts(plan, mesh=mesh, device=torch.device("cpu"))
        seen = set()
        # Inside a block, where FSDP's gathered weights are in place.
        for block in model.layers.values():
            block.attention.register_forward_hook(
                lambda module, _, out: seen.update({out.dtype, module.wq.weight.dtype})
            )
        step = build_forward_backward(
            model, loss_fn=build_loss(chunk_tokens=64, compile_backend=None), device=torch.device("cpu")
        )
        step(next(loader).microbatches(2), num_targets=100)
        return seen, {p.dtype for p in model.parameters()}, {p.grad.dtype for p in model.parameters()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_mixed_precision_computes_in_bf16_and_keeps_fp32_masters(corpus, tmp_path, world_size):
    argv = options(corpus, tmp_path, training__mixed_precision_param="bfloat16")
    for in_blocks, masters, gradients in run_ranks(mixed_precision_types, world_size, argv):
        assert in_blocks == {torch.bfloat16}
        assert masters == gradients == {torch.float32}


@pytest.mark.parametrize(
    ("capability", "expected"),
    [(None, torch.float64), ((9, 0), torch.float64), ((8, 9), torch.float32), ((10, 3), torch.float32)],
    ids=["simulated", "H200", "L40S", "B300"],
)
def test_norms_are_summed_in_float64_where_it_is_fast(capability, expected):
    assert norm_dtype(capability) == expected


def test_a_cpu_has_norms_to_the_last_bits_of_float64():
    """Of each tensor in order, of which the small ones are computed together."""
    generator = torch.Generator().manual_seed(0)
    shapes = (5, 77), (3, 2**17), (1, 1), (2**14, 1), (2**14 + 1, 1), (0, 4)
    tensors = [torch.randn(shape, generator=generator).T for shape in shapes]
    exact = [math.sqrt(math.fsum((tensor.double() ** 2).flatten().tolist())) for tensor in tensors]
    assert norms_of(tensors).tolist() == pytest.approx(exact, rel=1e-14)


def norm_with_copies():
    """Returns the norm of two gradients, of which the one is in shards and the other, no DTensor, on both ranks."""
    with process_group(Comm(), launch=Launch.from_environment(), device=torch.device("cpu")):
        mesh = init_device_mesh("cpu", (2,))
        sharded = torch.nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
        copied = torch.nn.Parameter(torch.zeros(4))
        sharded.grad, copied.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)]), torch.full((4,), 2.0)
        return gradient_norm([sharded, copied], ranks=2).item()


def test_a_gradient_that_no_axis_splits_counts_once_in_the_norm():
    assert run_ranks(norm_with_copies, 2) == [pytest.approx(20**0.5)] * 2


def test_norms_of_a_cpu_need_no_memory_of_the_size_of_gradients():
    tensor = torch.ones(2**22)
    with profile(profile_memory=True) as profiler:
        norms_of([tensor])
    allocated = [event.cpu_memory_usage for event in profiler.events()]
    assert 0 < max(allocated) < tensor.nbytes / 8


@pytest.mark.parametrize(("norm", "max_norm", "factor"), [(0.9, 1.0, 1.0), (4.0, 1.0, 0.25), (4.0, math.inf, 1.0)])
def test_gradients_are_scaled_down_to_the_maximum_norm(norm, max_norm, factor):
    found = clipping_factor(norm, max_norm=max_norm)
    assert found == pytest.approx(factor, rel=1e-6)
    assert (found == 1.0) == (factor == 1.0)  # exactly: nothing is scaled
