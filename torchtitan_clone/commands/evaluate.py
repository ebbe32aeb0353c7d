"""Runs tasks of lm-evaluation-harness on a checkpoint, without converting it; needs the extra "eval".

    python scripts/evaluate.py outputs/my_run --tasks=arc_easy,hellaswag
    python scripts/evaluate.py outputs/my_run --tasks=mine --include_path=my_tasks --json=results.json

The folder is that of a run, of a checkpoint, or one in the format of the Hugging Face hub. --include_path is a folder
with tasks of your own, as YAML files. The data of the harness's own tasks is downloaded from the Hugging Face hub.
"""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_clone.commands.model_options import add_model_options, open_from_options
from torchtitan_clone.commands.parsing import build_parser
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import install
from torchtitan_clone.observe.outputs import reports_errors
from torchtitan_clone.tools.trained_model import TrainedModel

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]


def find_tasks(names: Sequence[str], *, include_path: Path | None = None) -> "TaskManager":
    """Returns the harness's tasks, or those of a folder; ConfigError if it is not installed, or lacks one of them."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(f"the package lm_eval is not installed; {install('lm_eval')}")
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    manager = TaskManager(include_path=str(include_path), include_defaults=False) if include_path else TaskManager()
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise ConfigError(f"no such task: {', '.join(unknown)}; name the folder of your own as include_path")
    return manager


def evaluate(
    trained: TrainedModel, *, tasks: Sequence[str], manager: "TaskManager", limit: int | None = None, rows: int = 8
) -> dict[str, dict[str, object]]:
    """Returns the metrics of each task, of `limit` examples or of all; `rows` are computed together."""
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]

    from torchtitan_clone.tools.harness import HarnessModel

    model = HarnessModel(trained, rows=rows)
    return simple_evaluate(model=model, tasks=[*tasks], task_manager=manager, limit=limit)["results"]


@reports_errors
def main(words: list[str]) -> int:
    """Parses the command line and evaluates; returns the exit code."""
    parser = build_parser(__doc__)
    add_model_options(parser)
    parser.add_argument("--tasks", required=True, help="names of tasks, separated by commas")
    parser.add_argument("--include_path", type=Path, help="folder with YAML files, whose tasks replace the harness's")
    parser.add_argument("--limit", type=int, help="examples of each task; all by default")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args(words)
    if options.batch_size < 1:
        parser.error(f"--batch_size={options.batch_size}: must be at least 1")
    if options.json and not options.json.parent.is_dir():
        raise ConfigError(f"--json={options.json}: there is no folder {options.json.parent}; create it first")
    names = options.tasks.split(",")
    manager = find_tasks(names, include_path=options.include_path)
    trained = open_from_options(options)
    results = evaluate(trained, tasks=names, manager=manager, limit=options.limit, rows=options.batch_size)
    for task, metrics in results.items():
        values = {name: value for name, value in metrics.items() if isinstance(value, float)}
        print("\n".join(f"{task}  {name} {value:.6f}" for name, value in values.items()))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2, default=str) + "\n")
    return 0
