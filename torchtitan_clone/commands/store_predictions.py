"""Writes what a teacher predicts for the tokens of a run, which then needs no teacher: distillation.store.

    python scripts/store_predictions.py --teacher=outputs/teacher --job.config_file=my_run.toml
    torchrun --nproc_per_node=4 scripts/store_predictions.py --teacher=my_folder --k=100 --job.config_file=my_run.toml

Options of the run are given as to run_train.sh; those of the data, distillation.store, the folder that is written, and
distillation.temperature are read. The teacher is the folder of a run, a step-N folder or one of Hugging Face. Ranks are
on the mesh of these options, of which those of a pipeline shard the teacher. A source that is complete is left as it
is; after a kill the same command begins the one that it was writing anew.
"""

import logging
from pathlib import Path

import torch

from torchtitan_clone.commands.parsing import build_parser
from torchtitan_clone.config import load_run_config
from torchtitan_clone.config.imports import import_modules
from torchtitan_clone.observe.outputs import reports_errors
from torchtitan_clone.tools.predictions import Choices, store_predictions


@reports_errors
def main(words: list[str]) -> int:
    """Parses the command line and writes predictions; returns the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("--teacher", type=Path, required=True, help="folder of the teacher")
    parser.add_argument("--k", type=int, default=64, help="tokens that are stored at each position")
    parser.add_argument("--dtype", choices=["float16", "float32"], default="float16", help="of stored values")
    parser.add_argument("--compute_dtype", choices=["float32", "bfloat16"], default="float32", help="of the teacher")
    parser.add_argument("--rows", type=int, default=8, help="rows that a rank computes together")
    options, words = parser.parse_known_args(words)
    if options.rows < 1:
        parser.error(f"--rows={options.rows}: must be at least 1")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = load_run_config(words)
    import_modules(config.job.imports)
    choices = Choices(
        teacher=options.teacher, k=options.k, dtype=options.dtype, rows=options.rows,
        compute_dtype=getattr(torch, options.compute_dtype),
    )  # fmt: skip
    for line in store_predictions(config, choices):
        print(line)
    return 0
