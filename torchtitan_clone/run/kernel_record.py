"""Which of this package's kernels a run computes with: decided at its first start, and kept in `kernels.json`.

A kernel that one start lacks, because it was not compiled, would change the results of that start by rounding. Kernels
of attention also receive the keys of other ranks in collectives of their own, so that all ranks must use the same.
"""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from torchtitan_clone import doors
from torchtitan_clone.comm.json_collectives import all_gather_json, broadcast_json
from torchtitan_clone.config import ConfigError
from torchtitan_clone.documents import DocumentError, Value, read_json
from torchtitan_clone.files import write_atomically
from torchtitan_clone.observe.records import ignore_disk_errors
from torchtitan_clone.ops import kernels
from torchtitan_clone.run.plan import RunPlan

logger = logging.getLogger("torchtitan_clone")

KERNELS_FILE = "kernels.json"


@dataclass(frozen=True, kw_only=True)
class _Record:
    """What kernels.json has: the libraries of a run, and which of them computes attention."""

    libraries: list[str]
    attention: str | None
    """None in the record of an older version, which is the list of libraries alone."""

    @staticmethod
    def from_json(value: Value) -> "_Record":
        """Reads a record; DocumentError if it is none."""
        if isinstance(value.value, list):
            return _Record(libraries=[name.text() for name in value.items()], attention=None)
        table = value.table("libraries", "attention")
        libraries = [name.text() for name in table["libraries"].items()]
        attention = table["attention"]
        return _Record(
            libraries=libraries,
            attention=None if attention.value is None else attention.choice(kernels.TORCH, *libraries),
        )


@dataclass(frozen=True, kw_only=True)
class _Offer:
    """What one rank can use: libraries, with the multiples of a head's features that their attention takes."""

    multiples: dict[str, int]
    attention: str
    """The library whose attention is the fastest on its processor."""

    @staticmethod
    def from_json(value: Value) -> "_Offer":
        table = value.table("multiples", "attention")
        multiples = {name: size.integer(low=1) for name, size in table["multiples"].entries().items()}
        return _Offer(multiples=multiples, attention=table["attention"].text())


def settle_kernels(plan: RunPlan, *, rank: int, device: torch.device, resumes: bool) -> None:
    """Uses the kernels of the run's first start, or in that start those that all ranks have; a collective.

    ConfigError if a rank lacks a kernel with which the run was trained so far.
    """
    if device.type != "cpu":  # also of a run that was trained on a CPU before
        return
    own = _own_offer(plan)
    offers = [_Offer.from_json(value) for value in all_gather_json(asdict(own))]
    everywhere = set.intersection(*(set(offer.multiples) for offer in offers))
    file = plan.output_folder / KERNELS_FILE
    recorded = _broadcast(_read(file) if rank == 0 and resumes else None, file=file)
    chosen = everywhere if recorded is None else set(recorded.libraries)
    if missing := sorted(chosen - everywhere):
        ranks = [index for index, offer in enumerate(offers) if not chosen <= set(offer.multiples)]
        raise ConfigError(
            f"{file}: the run was trained with the kernels {', '.join(missing)}, which rank {ranks[0]} cannot load; "
            f"{doors.why_closed('cpu') or 'mend what its warning says'}, or delete the file to continue with torch's "
            "kernels, which round differently"
        )
    kernels.leave_out(set(own.multiples) - chosen)
    attention = (recorded and recorded.attention) or _agree_on_attention(offers, libraries=chosen)
    multiple = max(offer.multiples.get(attention, 1) for offer in offers)
    kernels.use_attention(_dtype(plan), library=attention, multiple=multiple)
    if own.multiples:
        names = ", ".join(sorted(chosen)) or "none, as in the run's first start"
        logger.info("kernels of this package: %s; attention: %s", names, attention)
    if rank == 0 and recorded is None:
        record = _Record(libraries=sorted(chosen), attention=attention)
        ignore_disk_errors(_write, file, json.dumps(asdict(record)).encode(), what=KERNELS_FILE)


def _dtype(plan: RunPlan) -> torch.dtype:
    return getattr(torch, plan.config.training.mixed_precision_param)


def _own_offer(plan: RunPlan) -> _Offer:
    is_compiled = plan.config.compile.compiles_model
    if kernels.CPU is None:
        return _Offer(multiples={}, attention=kernels.TORCH)
    return _Offer(
        multiples=kernels.CPU.available(compiles_model=is_compiled),
        attention=kernels.CPU.preferred_attention(_dtype(plan), is_compiled=is_compiled),
    )


def _agree_on_attention(offers: list[_Offer], *, libraries: set[str]) -> str:
    """Returns the library that all ranks prefer, or torch's kernels, which all have."""
    preferred = {offer.attention for offer in offers}
    return preferred.pop() if len(preferred) == 1 and preferred <= libraries else kernels.TORCH


def _broadcast(own: _Record | str | None, *, file: Path) -> _Record | None:
    """Returns rank 0's record on all ranks; ConfigError if its file is damaged."""
    value = broadcast_json(asdict(own) if isinstance(own, _Record) else own)
    if isinstance(value.value, str):
        raise ConfigError(f"{file} is damaged: {value.value}; delete it, and the kernels are decided again")
    return None if value.value is None else _Record.from_json(value)


def _read(file: Path) -> _Record | str | None:
    """Returns the record of a file, None without a file, and what is wrong with one that is damaged."""
    try:
        return _Record.from_json(read_json(file)) if file.exists() else None
    except (DocumentError, OSError) as error:
        return str(error)


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, content)
