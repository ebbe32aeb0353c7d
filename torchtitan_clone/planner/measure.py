"""Measures the hardware table of this machine: products, attention, memory and collectives.

On a CPU also steps of small models, from which the numbers follow that operations one by one do not show.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count, islice
from statistics import fmean, median

import torch
import torch.distributed as dist
import torch.nn.functional as F

from torchtitan_clone.config import load_config
from torchtitan_clone.config.overlay import toml_like
from torchtitan_clone.data import Batch
from torchtitan_clone.ops.tensor_region import use_tensor_region
from torchtitan_clone.parallel.gradients import clipping_factor, sum_over_ranks
from torchtitan_clone.planner.hardware import Cpu, Fitted, Hardware
from torchtitan_clone.planner.time_model import predict_step_time
from torchtitan_clone.run import preflight
from torchtitan_clone.run.engine import Engine, build_engine
from torchtitan_clone.run.memory import host_memory
from torchtitan_clone.run.plan import RunPlan
from torchtitan_clone.run.simulate import fake_batch
from torchtitan_clone.torch_compat import has_bfloat16_units

SIZES = (64, 128, 256, 512, 1024)
"""Smallest sizes of the products that are measured."""
ROWS = 2048
REPEATS = 4
MESSAGES = (1024, 16 * 2**20)
"""Bytes of the smallest and the largest collective."""
CPU = torch.device("cpu")
Round = tuple[Hardware, Sequence[Mapping[str, float]]]
"""Results of measure_hardware() and of measure_steps() on each number of ranks."""

MESHES = {
    "one rank": {},
    "four passes": {"training.global_batch_size": 12},
    "shard": {},
    "tensor": {"parallelism.tensor_parallel_degree": 2},
    "context": {"parallelism.context_parallel_degree": 2},
    "pipeline": {"parallelism.pipeline_parallel_degree": 2},
}
MODEL_OPTIONS = (
    "model.args.dim", "model.args.n_layers", "model.args.n_heads", "training.seq_len", "training.local_batch_size",
)  # fmt: skip
SMALL = ((64, 3, 4, 32, 3),)
SHORT = ((192, 4, 6, 128, 16), (320, 3, 10, 128, 16))
LONG = ((192, 4, 6, 512, 4), (320, 2, 10, 512, 4))
RUNS = (
    ("layer_us", "four passes", SMALL), ("update_us", "one rank", SMALL), ("eager_passes", "one rank", SHORT),
    ("score_ns", "one rank", LONG), ("shard_us", "shard", SMALL), ("contention", "shard", SHORT + LONG),
    ("tensor_us", "tensor", SMALL), ("tensor_passes", "tensor", SHORT + LONG), ("context_us", "context", SMALL),
    ("context", "context", LONG), ("pipeline", "pipeline", LONG),
)  # fmt: skip
"""Which number of the table follows from steps of which models, as in MODEL_OPTIONS, on which mesh."""
TURNS = 2
"""How often each is trained in turn; the first does not count."""
WARM_UP_STEPS = 1
"""Steps of a turn that do not count: the first ones after a pause of seconds take half a second longer."""
STEPS = 2


def best_seconds(function: Callable[[], object], *, device: torch.device, repeats: int = REPEATS) -> float:
    """Returns the shortest time of a call, of several after one that is not counted."""
    found = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found[1:])


def measure_hardware(device: torch.device, *, name: str, links: tuple[float, float]) -> Hardware:
    """Returns the table of a device; `links` are microseconds and GB/s of collectives, see measure_links()."""
    is_cpu = device.type == "cpu"
    if is_cpu:
        use_tensor_region()
    dtype = torch.bfloat16 if not is_cpu or has_bfloat16_units() else torch.float32
    products = [[size, round(_product_tflops(size, dtype=dtype, device=device), 4)] for size in SIZES]
    # On a CPU the time of attention follows from steps: the kernel, its mask and its blocks differ.
    attention = products[-1][1] if is_cpu else _attention_tflops(dtype=dtype, device=device)
    memory = _memory_gbps(dtype=dtype, device=device)
    memory_bytes = host_memory() if is_cpu else torch.cuda.mem_get_info(device)[1]
    link_us, link_gbps = links
    small = torch.ones(16, device=device)
    return Hardware(
        name=name,
        sources=[f"measured by scripts/measure_hardware.py with torch {torch.__version__}, {dtype}"],
        device_type=device.type,
        memory_gib=round(memory_bytes / 2**30, 1),
        products=products,
        memory_gbps=round(memory, 2),
        operation_us=round(1e6 * best_seconds(lambda: small + 1, device=device), 1),
        node_size=4096 if is_cpu else max(1, torch.cuda.device_count()),
        link_us=round(link_us, 1),
        link_gbps=round(link_gbps, 3),
        network_us=round(link_us, 1),
        network_gbps=round(link_gbps, 3),
        cpu=Cpu(cores=threads() if is_cpu else 0),
        fitted=Fitted(
            products=1.0, attention=round(attention / products[-1][1], 3), link=1.0, network=1.0, latency=1.0
        ),
    )


def _product_tflops(size: int, *, dtype: torch.dtype, device: torch.device) -> float:
    """Returns the speed of a linear layer, forward and backward, whose input has `size` features."""
    x = torch.randn(ROWS, size, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(4 * size, size, dtype=dtype, device=device, requires_grad=True)
    grad = torch.randn(ROWS, 4 * size, dtype=dtype, device=device)

    def step() -> None:
        torch.autograd.grad(F.linear(x, weight), (x, weight), grad)

    return 3 * 2 * ROWS * 4 * size**2 / best_seconds(step, device=device) / 1e12


def _attention_tflops(*, dtype: torch.dtype, device: torch.device) -> float:
    """Returns the speed of causal attention, in forward FLOPs; its backward counts 2.5 times as many."""
    shape = (4, 8, 1024, 64)
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, dtype=dtype, device=device)

    def step() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad)

    rows, heads, tokens, features = shape
    flops = 3.5 * 4 * rows * heads * tokens * tokens / 2 * features
    return flops / best_seconds(step, device=device) / 1e12


def _memory_gbps(*, dtype: torch.dtype, device: torch.device) -> float:
    """Returns the bandwidth of an operation that reads two large tensors and writes one."""
    x, y, out = (torch.ones(2**24, dtype=dtype, device=device) for _ in range(3))
    size = 3 * x.numel() * x.element_size()
    return size / best_seconds(lambda: torch.mul(x, y, out=out), device=device) / 1e9


def step_plans(mesh: str, sizes: Iterable[Sequence[int]]) -> list[RunPlan]:
    """Returns the plans of models that are small enough to be measured."""
    options = {
        "training.mixed_precision_param": "bfloat16" if has_bfloat16_units() else "float32",
        "activation_checkpoint.mode": "none", "model.args.n_kv_heads": 2, **MESHES[mesh],
    }  # fmt: skip
    runs = [options | dict(zip(MODEL_OPTIONS, size, strict=True)) for size in sizes]
    configs = [load_config([f"--{key}={value}" for key, value in run.items()]) for run in runs]
    ranks = 1 if mesh in ("one rank", "four passes") else 2
    return [preflight.resolve(config, world_size=ranks, device_type="cpu") for config in configs]


class SmallModels:
    """The models of those of RUNS that the process group, on CPUs, has the number of ranks for."""

    def __init__(self) -> None:
        ranks = dist.get_world_size()
        torch.set_num_threads(max(1, threads() // ranks))
        plans = {name: step_plans(mesh, sizes) for name, mesh, sizes in RUNS}
        self._steps = {name: list(map(_steps, each)) for name, each in plans.items() if each[0].world_size == ranks}

    def step_seconds(self, *, warm_up: bool) -> dict[str, float]:
        """Trains each model for a turn; returns the seconds by name in RUNS, whose models' steps are added."""
        return {name: sum(turn_seconds(each, warm_up=warm_up) for each in steps) for name, steps in self._steps.items()}


def turn_seconds(steps: Iterator[float], *, warm_up: bool) -> float:
    """Returns the mean of the seconds of the steps of a turn that count; without a warm-up, of a single step."""
    return fmean(list(islice(steps, WARM_UP_STEPS + STEPS))[WARM_UP_STEPS:]) if warm_up else next(steps)


def measure_steps(*, warm_up: bool) -> dict[str, float]:
    """Returns the median seconds of the steps of the small models; without a warm-up, of a single step of each."""
    models = SmallModels()
    found = [models.step_seconds(warm_up=warm_up) for _ in range(TURNS if warm_up else 1)]
    found = found[1:] or found
    return {name: median(each[name] for each in found) for name in found[0]}


def _steps(plan: RunPlan) -> Iterator[float]:
    """Yields the seconds of training steps, without end."""
    engine = build_engine(plan, device=CPU)
    batches = [fake_batch(plan)] * plan.microbatches
    yield from seconds_of(lambda step: _train_step(engine, batches, step=step))


def seconds_of(train_step: Callable[[int], object]) -> Iterator[float]:
    """Yields the seconds of calls with the number of the step, without end."""
    for step in count(1):
        start = time.perf_counter()
        train_step(step)
        yield time.perf_counter() - start


def _train_step(engine: Engine, batches: Sequence[Batch], *, step: int) -> None:
    engine.begin_step(step)
    (num_targets,) = sum_over_ranks([sum(batch.num_targets for batch in batches)])
    output = engine.forward_backward(batches, num_targets=int(num_targets))
    norm, *sums = engine.read(engine.gradient_norm(), output)
    sum_over_ranks(sums)
    engine.optimizer.step(factor=clipping_factor(norm, max_norm=engine.plan.config.training.max_norm))
    engine.optimizer.zero_grad()


def fit_rounds(rounds: Sequence[Round]) -> Hardware:
    """Returns the medians of tables; with it the predicted times of small steps are the medians of those measured."""
    hardware = _median_table([table for table, _ in rounds])
    found = {name: [each[name] for _, steps in rounds for each in steps if name in each] for name, _, _ in RUNS}
    plans = {name: step_plans(mesh, sizes) for name, mesh, sizes in RUNS if found[name]}
    for _ in range(5):  # each number depends a little on the others
        for name in plans:
            hardware = _fit(hardware, name, plans=plans[name], seconds=median(found[name]))
    return hardware


def _median_table(tables: Sequence[Hardware]) -> Hardware:
    columns = zip(*(table.products for table in tables), strict=True)
    products = [[column[0][0], round(median(speed for _, speed in column), 4)] for column in columns]
    names = ("memory_gbps", "operation_us", "link_us", "link_gbps", "network_us", "network_gbps")
    medians = {name: round(median(getattr(table, name) for table in tables), 3) for name in names}
    return replace(tables[0], products=products, **medians)


def _fit(hardware: Hardware, name: str, *, plans: Sequence[RunPlan], seconds: float) -> Hardware:
    """Returns the table with the value, at least 0, with which the steps take so long; the time is linear in it."""

    def table(value: float) -> Hardware:
        if hasattr(hardware.cpu, name):
            return replace(hardware, cpu=replace(hardware.cpu, **{name: value}))
        return replace(hardware, fitted=replace(hardware.fitted, **{name: value}))

    def predicted(value: float) -> float:
        return sum(predict_step_time(plan, hardware=table(value)).seconds for plan in plans)

    least, slope = predicted(0.0), predicted(1.0) - predicted(0.0)
    return table(round(max(0.0, (seconds - least) / slope), 3) if slope else 0.0)


def measure_links() -> tuple[float, float]:
    """Returns microseconds of a message and GB/s between the ranks of the process group."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    small, large = (_sum_seconds(size, device=device) for size in MESSAGES)
    ranks = dist.get_world_size()
    received = 2 * MESSAGES[1] * (ranks - 1) / ranks
    return 1e6 * small / (2 * (ranks - 1)), received / max(large - small, 1e-9) / 1e9


def _sum_seconds(size: int, *, device: torch.device) -> float:
    tensor = torch.ones(size // 4, device=device)
    return best_seconds(lambda: dist.all_reduce(tensor), device=device, repeats=20)


def to_toml(hardware: Hardware) -> str:
    """Returns the table as text."""
    values = asdict(hardware)
    tables = {"cpu": values.pop("cpu"), "fitted": values.pop("fitted")}
    lines = [f"{name} = {toml_like(value)}" for name, value in values.items()]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {toml_like(value)}" for key, value in table.items())]
    return "\n".join([*lines, ""])


def threads() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))
