"""State in bfloat16: the same bits on any mesh and after a resume, half the memory, and the losses of fp32 state."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support import runs
from tests.support.harness import run_ranks
from tests.support.trainers import full_copies, open_trainers
from torchtitan_clone.config import load_config
from torchtitan_clone.config.schema_training import Optimizer, OptimizerGroup
from torchtitan_clone.interfaces import MatrixLayout
from torchtitan_clone.optim import build_optimizer
from torchtitan_clone.parallel.runtime import Launch, process_group

BFLOAT16 = {"state_dtype": "bfloat16"}
SHAPES = {"vector": (67,), "few.rows": (2, 40), "matrix": (65, 48), "experts": (6, 33, 16), "muon": (65, 48)}
LAYOUTS = {
    (2,): ([Shard(0)], [Shard(0)], [Shard(1)], [Shard(0)], [Shard(0)]),
    (3,): ([Shard(0)], [Shard(0)], [Shard(0)], [Shard(1)], [Shard(1)]),
    (2, 2): (
        [Replicate(), Shard(0)], [Replicate(), Replicate()], [Shard(0), Shard(1)], [Shard(0), Shard(1)],
        [Replicate(), Shard(0)],
    ),
}  # fmt: skip
"""Uneven shards, fewer rows than ranks, rows and columns, replicas, and stacks over an axis of their own."""


def container_of(values, **options):
    muon = OptimizerGroup(pattern="muon", name="Muon", args=BFLOAT16 | {"dtype": "float32"})
    settings = Optimizer(lr=0.01, args=BFLOAT16, groups=[muon], **options)
    parameters = {name: nn.Parameter(value) for name, value in values.items()}
    group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    return parameters, build_optimizer(settings, named_parameters=parameters, layout=MatrixLayout(group=group), seed=3)


def differences(shape):
    """Returns how many values of weights and state differ in bits from those of plain tensors after four steps."""
    with process_group(load_config([]).comm, launch=Launch.from_environment(), device=torch.device("cpu")):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
        generator = torch.Generator().manual_seed(0)
        values = {name: torch.randn(each, generator=generator) for name, each in SHAPES.items()}
        layouts = dict(zip(values, LAYOUTS[shape], strict=True))
        plain, one = container_of({name: value.clone() for name, value in values.items()})
        sharded, other = container_of({name: distribute_tensor(x, mesh, layouts[name]) for name, x in values.items()})
        for _ in range(4):
            for name, parameter in plain.items():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
                sharded[name].grad = distribute_tensor(parameter.grad.clone(), mesh, layouts[name])
            one.step(factor=0.5)
            other.step(factor=0.5)
        expected, found = ({**weights, **each.state_dict()} for weights, each in ((plain, one), (sharded, other)))
        found = full_copies(found.items())
        assert {x.dtype for name, x in found.items() if "exp_avg" in name or "buffer" in name} == {torch.bfloat16}
        return {name: int((found[name] != x.detach()).sum()) for name, x in expected.items()}


@pytest.mark.parametrize("shape", LAYOUTS)
def test_every_layout_gives_the_bits_of_one_device(shape):
    ranks = torch.Size(shape).numel()
    found = run_ranks(differences, ranks, shape)
    assert found == [dict.fromkeys(found[0], 0)] * ranks


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_float32_it_is_torchs(name, dtype):
    """Moments in fp32 of weights in bfloat16, which torch has not, and the first step, of which nothing is rounded."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(40, 30, generator=generator).to(dtype)) for _ in range(2)]
    weights[1].data = weights[0].data.float()
    kinds = {torch.float32: "bfloat16", torch.bfloat16: "float32"}
    settings = Optimizer(name=name, lr=0.01, args={"state_dtype": kinds[dtype]})
    ours = build_optimizer(settings, named_parameters={"w": weights[0]})
    torchs = build_optimizer(Optimizer(name=name, lr=0.01), named_parameters={"w": weights[1]})
    for _ in range(1 if dtype == torch.float32 else 5):
        gradient = torch.randn(40, 30, generator=generator)
        weights[0].grad, weights[1].grad = gradient.to(dtype), gradient.to(dtype).float()
        ours.step()
        torchs.step()
        weights[1].data = weights[1].data.to(dtype).float()
    torch.testing.assert_close(weights[0].float(), weights[1], rtol=1e-6 if dtype == torch.float32 else 0.01, atol=1e-7)


def test_moments_of_many_steps_are_those_of_float32_on_average():
    """Of a constant gradient, whose steps are less than half a unit of bfloat16 and would be lost by rounding.

    The mean over the elements has a relative standard deviation of 1.2e-4.
    """
    weight = nn.Parameter(torch.zeros(256, 256))
    settings = Optimizer(lr=0.0, beta2=0.999, args=BFLOAT16)
    optimizer = build_optimizer(settings, named_parameters={"w": weight})
    for _ in range(400):
        weight.grad = torch.ones(256, 256)
        optimizer.step()
    moment = optimizer.state_dict()["w/exp_avg_sq"].double().mean().item()
    assert moment == pytest.approx(1 - 0.999**400, rel=6e-4)


def train_and_look(argvs):
    """Returns copies of the state of the optimizer before and after the training of each run."""
    found = []
    for trainer in open_trainers(argvs):
        before = full_copies(trainer.engine.optimizer.state_dict().items())
        assert trainer.train()
        found.append((before, full_copies(trainer.engine.optimizer.state_dict().items())))
    return found


def test_a_resume_has_the_same_bits_on_the_same_and_on_another_mesh(corpus, tmp_path):
    muon = '[{pattern = "layers.0.*.w?.weight", name = "Muon", args = {state_dtype = "bfloat16"}}]'
    tensor = {"parallelism__tensor_parallel_degree": 2}

    def run(name, steps, **mesh):
        options = {"training__steps": steps, "checkpoint__interval": 3, "lr_scheduler__total_steps": 6}
        kinds = {"optimizer__args__state_dtype": "bfloat16", "optimizer__groups": muon}
        return runs.options(corpus, tmp_path / name, **options, **kinds, **mesh)

    argvs = [run("whole", 6), run("a", 3), run("a", 6), run("b", 3), run("b", 6, **tensor)]
    whole, _, same, half, other = run_ranks(train_and_look, 2, argvs)[0]
    assert same[1].keys() == whole[1].keys()
    assert all(torch.equal(same[1][name], value) for name, value in whole[1].items())
    assert all(torch.equal(other[0][name], value) for name, value in half[1].items())
    assert {x.dtype for name, x in half[1].items() if not name.endswith("/step")} == {torch.bfloat16}


def test_the_state_takes_half_the_memory_and_trains_as_in_float32(corpus, tmp_path):
    def train(name, **changes):
        options = {"training__steps": 30, "lr_scheduler__warmup_steps": 5, "optimizer__lr": 1e-3}
        (found,) = run_ranks(train_and_look, 1, [runs.options(corpus, tmp_path / name, **options | changes)])[0]
        return sum(x.nbytes for x in found[1].values() if x.ndim), runs.losses(tmp_path / name)

    (size, losses), (half, others) = train("float32"), train("bfloat16", optimizer__args__state_dtype="bfloat16")
    assert half * 2 == size
    means = [sum(list(each.values())[-5:]) / 5 for each in (losses, others)]
    assert means[1] == pytest.approx(means[0], rel=0.005)
    assert others != losses
