"""Tokenizes the local data of a run before it starts, alone or as one of several tasks.

    python scripts/prepare_data.py --training.dataset_path=my_text
    sbatch --array=0-15 --wrap "python scripts/prepare_data.py --job.config_file=my_run.toml"

With --to=s3://my-bucket/tokens the token store is put there, for runs that name this URL as their data; those of a
mixture to a prefix of the name of each source.

Options of the run are given as to run_train.sh. A file of at least --part_mib, or several smaller ones together, are a
part. Task i of n makes the parts i, i + n, ...; --task and --tasks default to those of a Slurm array. The task that
finishes last joins the parts. After a kill, the same command with the same --part_mib continues: finished parts are not
made again.
"""

import logging
import math
from dataclasses import replace

from torchtitan_clone.commands.parsing import build_parser
from torchtitan_clone.config import ConfigError, load_run_config
from torchtitan_clone.config.checks import find_range_errors
from torchtitan_clone.config.environment import environment_integer
from torchtitan_clone.config.imports import import_modules
from torchtitan_clone.config.stages import find_data_errors
from torchtitan_clone.config.urls import data_url, find_url_errors
from torchtitan_clone.data import build_tokenizer
from torchtitan_clone.data.opening import find_sources, prepare_share, prepare_sources
from torchtitan_clone.data.token_store import PART_BYTES
from torchtitan_clone.observe.outputs import reports_errors
from torchtitan_clone.run.prepared import resolved_model


def array_task() -> tuple[int, int]:
    """Returns the index and the number of tasks of this Slurm array; one task where there is none."""
    first, last, step, task = (
        environment_integer(f"SLURM_ARRAY_TASK_{name}", default=low, low=low, high=2**31)
        for name, low in (("MIN", 0), ("MAX", 0), ("STEP", 1), ("ID", 0))
    )
    return (task - first) // step, (last - first) // step + 1


@reports_errors
def main(words: list[str]) -> int:
    """Parses the command line and prepares the data; returns the exit code."""
    task, tasks = array_task()
    parser = build_parser(__doc__)
    parser.add_argument("--task", type=int, default=task, help="which part of the work, from 0")
    parser.add_argument("--tasks", type=int, default=tasks, help="number of tasks")
    parser.add_argument("--part_mib", type=float, default=PART_BYTES / 2**20, help="size of a part, in MiB of text")
    parser.add_argument("--to", default="", help="URL of an object store that the token stores are put to")
    options, words = parser.parse_known_args(words)
    if options.to and data_url(options.to) is None:
        parser.error(f"--to={options.to}: must be the URL of an object store, as s3://my-bucket/tokens")
    for error in find_url_errors("--to", options.to):
        parser.error(error)
    if options.tasks < 1:
        parser.error(f"--tasks={options.tasks}: must be at least 1")
    if not 0 <= options.task < options.tasks:
        parser.error(f"--task={options.task}: must be from 0 to {options.tasks - 1} for --tasks={options.tasks}")
    if not 0 < options.part_mib < math.inf:
        parser.error(f"--part_mib={options.part_mib}: must be a number above 0")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = load_run_config(words)
    import_modules(config.job.imports)
    config = resolved_model(config)
    if errors := [*find_range_errors(config, at=""), *find_data_errors(config.data, training=config.training)]:
        raise ConfigError(errors)
    part_bytes = max(1, int(options.part_mib * 2**20))
    data = replace(config.data, drop_duplicates=config.data.drop_duplicates and not options.to)  # runs compare stores
    choices = {"training": config.training, "data": data, "part_bytes": part_bytes}
    if not (local := find_sources(training=config.training, data=config.data)):
        raise ConfigError(
            "every source is a token store, or is streamed and tokenized while it trains; nothing is prepared."
        )
    tokenizer = build_tokenizer(config.model.hf_assets_path, add_bos=config.data.add_bos)
    task = {"task": options.task, "tasks": options.tasks}
    if options.tasks > 1 and not prepare_share(**choices, **task, tokenizer=tokenizer):
        print(f"task {options.task} of {options.tasks} is done; others are not")
        return 0
    stores = prepare_sources(**choices, tokenizer=tokenizer)
    for name in local:
        store, place = stores[name], str(stores[name].folder)
        if options.to:
            from torchtitan_clone.data.remote import put_token_store

            place = "/".join([options.to.rstrip("/"), *([name] if config.data.sources else [])])
            put_token_store(store, place)
        print(f"{local[name].name}: {sum(store.meta.tokens.values()):,} tokens in {place}")
    return 0
