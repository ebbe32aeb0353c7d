"""Initial weights are the same bits on every mesh."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.harness import run_ranks
from torchtitan_clone.config.schema import Comm
from torchtitan_clone.parallel import init_weights as initial
from torchtitan_clone.parallel.init_weights import init_weights
from torchtitan_clone.parallel.runtime import Launch, process_group

SHAPES = {"a.weight": (37, 10), "b.weight": (5, 3), "c.weight": (64,), "d.norm": (7,), "e.rate": (90,)}


def std_of(name):
    return None if "norm" in name else torch.special.ndtr if "rate" in name else 0.5


def draw_whole(seed=1):
    parameters = {name: nn.Parameter(torch.empty(shape)) for name, shape in SHAPES.items()}
    init_weights(parameters, seed=seed, std_of=std_of)
    return {name: parameter.detach() for name, parameter in parameters.items()}


def draw_on_mesh(shape, dims, block_elements):
    initial.BLOCK_ELEMENTS = block_elements
    launch = Launch.from_environment()
    with process_group(Comm(), launch=launch, device=torch.device("cpu")):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("x", "y")[: len(shape)])
        parameters = {}
        for name, size in SHAPES.items():
            placements = [Shard(min(dim, len(size) - 1)) for dim in dims]
            parameters[name] = nn.Parameter(distribute_tensor(torch.zeros(size), mesh, placements))
        init_weights(parameters, seed=1, std_of=std_of)
        return {name: p.detach().full_tensor() for name, p in parameters.items()}


@pytest.mark.parametrize(
    ("shape", "dims"), [((3,), (0,)), ((2, 2), (0, 1)), ((2, 2), (1, 0)), ((4,), (1,))], ids=["3", "2x2", "2x2 t", "4"]
)
def test_equal_bits_on_every_mesh(shape, dims, monkeypatch):
    # Small blocks, so that shards begin and end inside them.
    monkeypatch.setattr(initial, "BLOCK_ELEMENTS", 40)
    expected = draw_whole()
    for answer in run_ranks(draw_on_mesh, torch.Size(shape).numel(), shape, dims, 40):
        for name, value in answer.items():
            assert torch.equal(value, expected[name]), name


def test_the_numbers_are_normal_cut_off_and_named():
    parameters = {name: nn.Parameter(torch.empty(2000, 300)) for name in ("p", "q")}
    init_weights(parameters, seed=0, std_of=lambda _: 0.1)
    p, q = parameters["p"].detach(), parameters["q"].detach()
    assert p.std().item() == pytest.approx(0.1, rel=0.01)
    assert p.mean().item() == pytest.approx(0, abs=0.001)
    assert p.abs().max().item() == pytest.approx(0.3)
    assert not torch.equal(p, q)
    # No block repeats another.
    rows = {hashlib.sha256(row.numpy().tobytes()).digest() for row in p}
    assert len(rows) == 2000
    assert not torch.equal(draw_whole(seed=1)["a.weight"], draw_whole(seed=2)["a.weight"])


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_numbers_do_not_depend_on_the_number_of_threads(request):
    drawn = draw_whole()["a.weight"]
    request.getfixturevalue("two_threads")
    assert torch.equal(drawn, draw_whole()["a.weight"])


def test_a_function_of_normal_numbers_gives_others():
    rates = draw_whole()["e.rate"]
    assert 0 < rates.min() < 0.1
    assert 0.9 < rates.max() < 1


def test_a_cutoff_changes_only_what_it_cuts_off():
    whole, clamped = ({"p": nn.Parameter(torch.empty(2000, 300))} for _ in range(2))
    init_weights(whole, seed=0, std_of=lambda _: 0.1, cutoff=float("inf"))
    init_weights(clamped, seed=0, std_of=lambda _: 0.1, cutoff=2.0)
    assert whole["p"].abs().max().item() > 0.4
    assert torch.equal(clamped["p"], whole["p"].clamp(-0.2, 0.2))


def most_threads(dtype):
    """Returns the largest number of threads of this process while it draws weights, less those that it had."""
    torch.set_num_threads(8)
    tasks = Path("/proc/self/task")
    parameters = {str(i): nn.Parameter(torch.empty(2048, 512, dtype=dtype)) for i in range(16)}
    before, done = len(list(tasks.iterdir())), Event()
    with ThreadPoolExecutor(1) as threads:
        counts = threads.submit(lambda: max(len(list(tasks.iterdir())) for _ in iter(done.is_set, True)))
        init_weights(parameters, seed=0, std_of=lambda _: 0.1)
        done.set()
        return counts.result() - before


def test_threads_that_draw_weights_start_no_others():
    """Of each of 8, OpenMP would start 7 more for an operation on a complete block."""
    for dtype in (torch.float32, torch.bfloat16):
        assert run_ranks(most_threads, 1, dtype)[0] <= 1 + 8
