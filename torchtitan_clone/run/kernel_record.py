"""Which of this package's kernels a run computes with: decided at its first start, and kept in `kernels.json`.

A kernel that one start lacks, because it was not compiled, would change the results of that start by rounding.
"""

import json
import logging
from pathlib import Path

import torch

from torchtitan_clone import doors
from torchtitan_clone.comm.json_collectives import all_gather_json, broadcast_json
from torchtitan_clone.config import ConfigError
from torchtitan_clone.documents import DocumentError, read_json
from torchtitan_clone.files import write_atomically
from torchtitan_clone.observe.records import ignore_disk_errors
from torchtitan_clone.ops import kernels
from torchtitan_clone.run.plan import RunPlan

logger = logging.getLogger("torchtitan_clone")

KERNELS_FILE = "kernels.json"


def settle_kernels(plan: RunPlan, *, rank: int, device: torch.device, resumes: bool) -> None:
    """Uses the kernels of the run's first start, or in that start those that all ranks have; a collective.

    ConfigError if a rank lacks a kernel with which the run was trained so far.
    """
    if device.type != "cpu":  # also of a run that was trained on a CPU before
        return
    own = kernels.available(device, compiles_model=plan.config.compile.compiles_model)
    by_rank = [{name.text() for name in value.items()} for value in all_gather_json(own)]
    everywhere = set.intersection(*by_rank)
    file = plan.output_folder / KERNELS_FILE
    recorded = broadcast_json(_read(file) if rank == 0 and resumes else None)
    if isinstance(recorded.value, str):
        raise ConfigError(f"{file} is damaged: {recorded.value}; delete it, and the kernels are decided again")
    chosen = everywhere if recorded.value is None else {name.text() for name in recorded.items()}
    if missing := sorted(chosen - everywhere):
        ranks = [index for index, names in enumerate(by_rank) if not chosen <= names]
        raise ConfigError(
            f"{file}: the run was trained with the kernels {', '.join(missing)}, which rank {ranks[0]} cannot load; "
            f"{doors.why_closed('cpu') or 'mend what its warning says'}, or delete the file to continue with torch's "
            "kernels, which round differently"
        )
    kernels.leave_out(set(own) - chosen)
    if own:
        logger.info("kernels of this package: %s", ", ".join(sorted(chosen)) or "none, as in the run's first start")
    if rank == 0 and recorded.value is None:
        ignore_disk_errors(_write, file, json.dumps(sorted(chosen)).encode(), what=KERNELS_FILE)


def _read(file: Path) -> list[str] | str | None:
    """Returns the names that the file has, None without a file, and what is wrong with one that is damaged."""
    try:
        return [name.text() for name in read_json(file).items()] if file.exists() else None
    except (DocumentError, OSError) as error:
        return str(error)


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, content)
