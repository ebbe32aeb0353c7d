"""Muon: equal to torch's on one device, whole matrices on any layout, one owner each, and what it is refused for."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support import runs
from tests.support.harness import run_ranks
from torchtitan_clone.config import load_config
from torchtitan_clone.config.schema_training import Optimizer, OptimizerGroup
from torchtitan_clone.interfaces import MatrixLayout
from torchtitan_clone.ops.orthogonalize import orthogonalize
from torchtitan_clone.optim import build_optimizer, find_optimizer_errors
from torchtitan_clone.optim.groups import resolve_groups
from torchtitan_clone.optim.matrices import assign_owners
from torchtitan_clone.optim.schedule import Factors
from torchtitan_clone.parallel.runtime import Launch, process_group

SHAPES = [(64, 48), (48, 64), (65, 48), (2, 40), (6, 32, 16), (6, 16, 32)]
"""Rows that no number of ranks here divides, fewer rows than ranks, and stacks as of experts."""
BLOCKS = [None, 8, None, None, None, 4]


def muon_of(parameters, *, group=None, block_rows=(), **args):
    settings = Optimizer(name="Muon", lr=0.02, args={"dtype": "float32", **args})
    named = {f"layers.{index}.weight": parameter for index, parameter in enumerate(parameters)}
    rows = {name: block for name, block in zip(named, block_rows, strict=False) if block}
    return build_optimizer(settings, named_parameters=named, layout=MatrixLayout(group=group, block_rows=rows.get))


@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_it_is_torchs_on_one_device(monkeypatch, adjust_lr, nesterov):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's has no other data type
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES if len(shape) == 2]
    ours, theirs = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    optimizer = muon_of(ours, adjust_lr=adjust_lr, nesterov=nesterov)
    reference = torch.optim.Muon(theirs, lr=0.02, adjust_lr_fn=adjust_lr, nesterov=nesterov)
    for _ in range(5):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_the_decay_and_the_momentum_of_a_step_are_those_of_its_factors(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's has no other data type
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(48, 64)) for _ in range(2))
    optimizer = muon_of([ours], momentum=0.9)
    reference = torch.optim.Muon([theirs], lr=0.02, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        decay, momentum = 1 - step / 4, 0.5 + step / 8
        optimizer.set_factors(Factors(lr=1.0, weight_decay=decay, momentum=momentum))
        reference.param_groups[0].update(weight_decay=0.1 * decay, momentum=0.9 * momentum)
        ours.grad = torch.randn(ours.shape, generator=generator)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("coefficients", "lowest", "highest"), [("quintic", 0.6, 1.25), ("polar_express", 0.8, 1.2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values_come_close_to_one(coefficients, lowest, highest, dtype):
    """Gaussian matrices of 256 x 192 after five iterations; their singular vectors are kept."""
    u = torch.randn(3, 256, 192, generator=torch.Generator().manual_seed(0))
    x = orthogonalize(u, coefficients=coefficients, iterations=5, dtype=dtype).float()
    assert all(lowest < value < highest for value in torch.linalg.svdvals(x).flatten().tolist())
    left, _, right = torch.linalg.svd(u, full_matrices=False)
    diagonal = left.mT @ x @ right.mT
    assert (diagonal - torch.diag_embed(diagonal.diagonal(dim1=-2, dim2=-1))).abs().max() < 0.02
    wide = orthogonalize(u.mT, coefficients=coefficients, iterations=5, dtype=dtype).mT.float()
    assert (wide - x).abs().max() < (1e-5 if dtype == torch.float32 else 0.02)


def test_a_matrix_without_gradient_stays_finite_and_only_decays():
    weight = nn.Parameter(torch.ones(4, 6))
    optimizer = muon_of([weight])
    optimizer.step()
    weight.grad = torch.zeros(4, 6)
    optimizer.step()
    torch.testing.assert_close(weight, torch.full((4, 6), (1 - 0.02 * 0.1) ** 2))


LAYOUTS = {
    (2,): [[Shard(0)], [Replicate()], [Shard(1)], [Shard(0)], [Shard(0)], [Shard(1)]],
    (3,): [[Shard(0)], [Shard(1)], [Replicate()], [Shard(0)], [Shard(1)], [Shard(0)]],
    (2, 2): [
        [Shard(0), Shard(0)], [Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(0), Shard(0)],
        [Shard(1), Shard(0)], [Replicate(), Replicate()],
    ],
}  # fmt: skip
KINDS = [
    {},
    {"nesterov": False, "cautious": True, "coefficients": "polar_express"},
    {"blocks": "head", "normalize": "neuron"},
    {"dtype": "bfloat16"},
]


def train_on_mesh(shape):
    """Returns the largest difference of weights and state from those of plain tensors, for each kind of options."""
    with process_group(load_config([]).comm, launch=Launch.from_environment(), device=torch.device("cpu")):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(each, generator=generator) for each in SHAPES]
        differences = []
        for args in KINDS:
            plain = [nn.Parameter(value.clone()) for value in values]
            sharded = [nn.Parameter(distribute_tensor(x, mesh, p)) for x, p in zip(values, LAYOUTS[shape], strict=True)]
            one = muon_of(plain, block_rows=BLOCKS, **args)
            other = muon_of(sharded, block_rows=BLOCKS, group=dist.group.WORLD, **args)
            for _ in range(4):
                for x, y in zip(plain, sharded, strict=True):
                    x.grad = torch.randn(x.shape, generator=generator)
                    y.grad = distribute_tensor(x.grad.clone(), mesh, y.placements)
                one.step(factor=0.5)
                other.step(factor=0.5)
            pairs = [*zip(plain, sharded, strict=True)]
            expected, found = one.state_dict(), other.state_dict()
            assert expected.keys() == found.keys()
            pairs += [(expected[name], found[name]) for name in expected]
            differences.append(max((y.full_tensor() - x).abs().max().item() for x, y in pairs))
        return differences


@pytest.mark.parametrize("shape", LAYOUTS)
def test_every_layout_gives_the_bits_of_one_device(shape):
    world_size = torch.Size(shape).numel()
    assert run_ranks(train_on_mesh, world_size, shape) == [[0.0] * len(KINDS)] * world_size


def owners_of_ranks(rows):
    """Returns the owner and the sent values of each matrix, as this rank sees them."""
    with process_group(load_config([]).comm, launch=Launch.from_environment(), device=torch.device("cpu")):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        weights = [distribute_tensor(torch.zeros(each, 8), mesh, [Shard(0)]) for each in rows]
        stack = distribute_tensor(torch.zeros(2 * dist.get_world_size(), 4, 8), mesh, [Shard(0)])
        buckets = assign_owners(
            [*weights, stack], block_rows=[None] * (len(rows) + 1), cost=lambda m, n: m * n, rank=dist.get_rank()
        )
        return [(m.parameter, m.region, m.owner, sorted(m.parts)) for bucket in buckets for m in bucket]


def test_all_ranks_agree_on_one_owner_for_each_matrix_and_share_the_work():
    rows = [8, 8, 8, 8, 8, 8, 2]
    first, *others = run_ranks(owners_of_ranks, 3, rows)
    assert all(other == first for other in others)
    assert len({(parameter, tuple(region)) for parameter, region, *_ in first}) == len(first) == len(rows) + 6
    costs = [sum((r[-2][1] - r[-2][0]) for _, r, owner, _ in first if owner == rank) for rank in range(3)]
    assert max(costs) - min(costs) <= 8
    # An expert that one rank holds stays there; of two rows, the third rank holds none.
    assert all(holders == [owner] for parameter, _, owner, holders in first if parameter == len(rows))
    assert [holders for parameter, *_, holders in first if parameter == len(rows) - 1] == [[0, 1]]


NAMES = {
    "tok_embeddings.weight": (64, 8), "layers.0.attention.wq.weight": (8, 8), "layers.0.norm.weight": (8,),
    "layers.0.experts.w1": (4, 8, 8), "layers.0.experts.w1_bias": (4, 8), "output.weight": (64, 8),
}  # fmt: skip
PARAMETERS = {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in NAMES.items()}


def test_the_table_leaves_vectors_embedding_and_output_to_adamw():
    options = Optimizer(name="Muon", args={"momentum": 0.9}, groups=[OptimizerGroup(pattern="output.*", lr=0.5)])
    groups = resolve_groups(options, parameters=PARAMETERS)
    assert {name: (group.settings.name, group.settings.args) for group in groups for name in group.parameters} == {
        name: ("Muon", {"momentum": 0.9}) if name.endswith(("wq.weight", "experts.w1")) else ("AdamW", {})
        for name in NAMES
    }
    assert [group.settings.lr for group in groups if "output.weight" in group.parameters] == [0.5]
    own = Optimizer(groups=[OptimizerGroup(pattern="layers.*.w?.*", name="Muon", args={"iterations": 3})])
    (muon,) = [group for group in resolve_groups(own, parameters=PARAMETERS) if group.settings.name == "Muon"]
    assert [*muon.parameters] == ["layers.0.attention.wq.weight"]
    assert muon.settings.args == {"iterations": 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Optimizer(name="Muon", args={"momentun": 0.9}),
         "optimizer.args.momentun: unknown option; did you mean args.momentum?"),
        (Optimizer(args={"momentum": 0.9}),
         'optimizer.args.momentum: unknown option; known: state_dtype'),
        (Optimizer(name="Muon", args={"dtype": "fp8"}),
         'optimizer.args.dtype = "fp8": must be "auto" | "bfloat16" | "float32"'),
        (Optimizer(name="Muon", args={"iterations": 0}),
         "optimizer.args.iterations = 0: must be from 1 to 100."),
        (Optimizer(groups=[OptimizerGroup(pattern="*norm.weight", name="Muon")]),
         'optimizer "Muon" updates matrices only, and is assigned layers.*.norm.weight; name another optimizer for '
         "them in optimizer.groups"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(options, message):
    assert find_optimizer_errors(options, parameters=PARAMETERS) == [message]


MESHES = {
    "one": (1, {}),
    "pipeline x tensor": (4, {"parallelism__pipeline_parallel_degree": 2, "parallelism__tensor_parallel_degree": 2}),
    "shard": (2, {"parallelism__data_parallel_shard_degree": 2}),
}


def test_ten_steps_are_those_of_one_device_and_resume_on_another_mesh(corpus, tmp_path):
    def run(name, mesh, **changes):
        world_size, degrees = MESHES[mesh]
        options = {"training__steps": 10, "training__local_batch_size": 2, "optimizer__name": "Muon",
                   "optimizer__args__dtype": "float32", "checkpoint__interval": 5}  # fmt: skip
        code, output = runs.train(
            runs.options(corpus, tmp_path / name, **options | degrees | changes), world_size=world_size,
            log_folder=tmp_path,
        )  # fmt: skip
        assert code == 0, output
        return runs.losses(tmp_path / name)

    expected = run("one", "one")
    assert run("mesh", "pipeline x tensor") == pytest.approx(expected, rel=1e-5)
    run("resumed", "pipeline x tensor", training__steps=5, lr_scheduler__total_steps=10)
    resumed = run("resumed", "shard", lr_scheduler__total_steps=10)
    assert resumed == pytest.approx(expected, rel=1e-5)
    assert all(before > after for before, after in pairwise([expected[1], expected[5], expected[10]]))
