"""Hardware tables: speeds of a device and of its links, in TOML files that name their sources."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import tomli

from torchtitan_clone.config import Config, ConfigError, overlay
from torchtitan_clone.config.messages import shown
from torchtitan_clone.config.started import as_started
from torchtitan_clone.documents import DocumentError, read_regular
from torchtitan_clone.run.describe import DEVICE_TYPES

TABLES = Path(__file__).parent / "tables"
DIVISORS = re.compile(r"memory_.*|node_size|(link|network)_gbps|fitted\.(products|float8|attention|link|network)")
"""Numbers of a table that must be above 0."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """What a training step reaches of the other numbers of a table, and how often it passes over its tensors.

    The defaults are fitted to half of the published rows by `tests/campaigns/planner.py --calibrate`.
    """

    products: float = 0.65
    """Fraction of the speed of matrix products."""
    float8: float = 1.9
    """Speed of products in float8, in those of bfloat16; casts count as memory traffic."""
    attention: float = 0.42
    """Speed of attention forward, as a fraction of that of products; its backward takes 2.5 times as many FLOPs."""
    context: float = 0.28
    """Slowdown of attention in blocks of other ranks' keys, on infinitely many context-parallel ranks."""
    link: float = 0.589
    """Fraction of the bandwidth within a node."""
    network: float = 0.6
    """Fraction of the bandwidth between nodes."""
    latency: float = 3.0
    """Time of a message between nodes, in those of the table."""
    eager_passes: float = 7.73
    """Reads and writes of the result of each product by elementwise operations, run one by one."""
    compiled_passes: float = 3.08
    """The same in compiled blocks."""
    async_tensor: float = 0.299
    """Share of the communication of tensor parallelism that asynchronous tensor parallelism hides."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Speeds of one GPU of a cluster; bandwidths are per GPU and direction."""

    name: str = ""
    sources: list[str] = field(default_factory=list[str])
    memory_gib: float = 0.0
    """Memory that a process can allocate."""
    peak_tflops: float = 0.0
    """Of dense bf16 products on the data sheet, from which MFU is computed; 0: unknown."""
    products: list[list[float]] = field(default_factory=list[list[float]])
    """Speed of products in TFLOP/s by the smallest of their three sizes, in pairs with increasing sizes."""
    memory_gbps: float = 1.0
    operation_us: float = 0.0
    """Time that an operation takes in addition to its FLOPs or bytes."""
    node_size: int = 8
    """GPUs of a node."""
    link_gbps: float = 1.0
    """Bandwidth within a node."""
    link_us: float = 0.0
    """Time of one message of a collective within a node, whatever its size."""
    network_gbps: float = 1.0
    network_us: float = 0.0
    fitted: Fitted = field(default_factory=Fitted)

    @cached_property
    def _curve(self) -> list[tuple[float, float]]:
        return [(math.log(size), tflops * 1e12) for size, tflops in self.products]

    def product_speed(self, size: float) -> float:
        """Returns FLOP/s of products whose smallest size is `size`, interpolated on a logarithmic scale."""
        at, curve = math.log(max(1.0, size)), self._curve
        if at <= curve[0][0]:
            return curve[0][1]
        for (low, slow), (high, fast) in pairwise(curve):
            if at <= high:
                return slow + (fast - slow) * (at - low) / (high - low)
        return curve[-1][1]

    def collective_seconds(self, kind: str, *, size: float, ranks: int, stride: int) -> float:
        """Returns the time of one collective of `size` bytes, of its larger side, over `ranks` ranks `stride` apart.

        Rings of alpha and beta: each rank sends and receives all but its share, in ranks - 1 messages. Between nodes,
        the ranks of a node that belong to the group use their networks together.
        """
        if ranks == 1:
            return 0.0
        here = max(1, min(ranks, self.node_size // stride))
        nodes = -(-ranks // here)
        link, network = 1e9 * self.link_gbps * self.fitted.link, 1e9 * self.network_gbps * self.fitted.network
        hop, far_hop = 1e-6 * self.link_us, 1e-6 * self.network_us * self.fitted.latency
        others = (ranks - 1) / ranks
        if kind in ("send", "recv"):
            near = ranks * stride <= self.node_size
            return hop + size / link if near else far_hop + size / network
        latency = hop * (here - 1) * nodes + far_hop * (nodes - 1)
        if kind == "all_to_all":
            far = (ranks - here) / ranks
            return latency + max(size * (others - far) / link, size * far / network)
        bandwidth = link if nodes == 1 else min(link, here * network)
        twice = 2 if kind == "all_reduce" else 1
        return twice * (latency + size * others / bandwidth)


def known_hardware() -> list[str]:
    """Returns the names of the tables of this package."""
    return sorted(path.stem for path in TABLES.glob("*.toml"))


def named_hardware(config: Config) -> Hardware | None:
    """Returns the table that job.dry_run_device names, if it does; ConfigError for an unknown one."""
    name = config.job.dry_run_device
    if name in DEVICE_TYPES:
        return None
    try:
        return read_hardware(name)
    except ConfigError as error:
        raise ConfigError(f"job.dry_run_device: must be {', '.join(DEVICE_TYPES)} or hardware; {error}") from None


def read_hardware(name: str) -> Hardware:
    """Returns the table of that name or in that file; ConfigError for an unknown name or an invalid table."""
    path = Path(name) if name.endswith(".toml") else TABLES / f"{name.lower()}.toml"
    if not name.endswith(".toml") and name.lower() not in known_hardware():
        remedy = as_started("or the path of a table that scripts/measure_hardware.py wrote")
        raise ConfigError(f"hardware {shown(name)}: unknown; name one of {', '.join(known_hardware())}, {remedy}.")
    try:
        values = tomli.loads(read_regular(path, follow_links=True).decode())
        kind, _ = values.pop("device_type", "cuda"), values.pop("cpu", None)  # of tables of earlier versions
        hardware = overlay(Hardware(), values, where=path.name)
    except (DocumentError, OSError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"hardware table {path}: cannot be read: {error}; measure or download it again.") from None
    if kind != "cuda":
        raise ConfigError(f"hardware table {path}: device_type = {shown(kind)}: only GPUs are planned for.")
    if error := next(_table_errors(hardware), None):
        raise ConfigError(f"hardware table {path}: {error}; correct it.")
    return hardware


def _table_errors(hardware: Hardware) -> Iterator[str]:
    """Yields what the model cannot compute with."""
    curve = hardware.products
    is_valid = all(len(pair) == 2 and all(0 < each < math.inf for each in pair) for pair in curve)
    if not curve or not is_valid or sorted(curve) != curve:
        yield "products must be pairs of a size and TFLOP/s, all finite and above 0, with increasing sizes"
    for prefix, table in (("", hardware), ("fitted.", hardware.fitted)):
        for name, value in vars(table).items():
            divides = DIVISORS.fullmatch(prefix + name)
            if isinstance(value, int | float) and not (0 < value < math.inf or (value == 0 and not divides)):
                yield f"{prefix}{name} = {value} must be finite and {'above' if divides else 'at least'} 0"
