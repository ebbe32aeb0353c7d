"""Runs tasks of lm-evaluation-harness on a checkpoint, without converting it; needs the extra "eval".

    python scripts/evaluate.py outputs/my_run --tasks=arc_easy,hellaswag
    python scripts/evaluate.py outputs/my_run --tasks=mine --include_path=my_tasks --json=results.json

The folder is that of a run, of a checkpoint, or one in the format of the Hugging Face hub. --include_path is a folder
with tasks of your own, as YAML files. The data of the harness's own tasks is downloaded from the Hugging Face hub.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import install
from torchtitan_clone.observe.outputs import reports_errors
from torchtitan_clone.tools.trained_model import open_trained_model


def evaluate(options: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Returns the metrics of each task."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(f"the package lm_eval is not installed; {install('lm_eval')}")
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    from torchtitan_clone.tools.harness import HarnessModel

    own = options.include_path
    manager = TaskManager(include_path=str(own), include_defaults=False) if own else TaskManager()
    names = options.tasks.split(",")
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise ConfigError(f"--tasks: no such task: {', '.join(unknown)}; give the folder of your own as --include_path")
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    trained = open_trained_model(options.folder, dtype=dtype, device=device, hf_assets_path=options.hf_assets_path)
    model = HarnessModel(trained, rows=options.batch_size)
    return simple_evaluate(model=model, tasks=names, task_manager=manager, limit=options.limit)["results"]


@reports_errors
def main(words: list[str] | None = None) -> int:
    """Parses the command line and evaluates; returns the exit code."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="a run's folder, a step-N folder, or a Hugging Face folder")
    parser.add_argument("--tasks", required=True, help="names of tasks, separated by commas")
    parser.add_argument("--include_path", type=Path, help="folder with YAML files, whose tasks replace the harness's")
    parser.add_argument("--limit", type=int, help="examples of each task; all by default")
    parser.add_argument("--batch_size", type=int, default=8, help="rows that are computed together")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hf_assets_path", help="the tokenizer's folder, where it is not where the run found it")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args(words)
    if options.batch_size < 1:
        parser.error(f"--batch_size={options.batch_size}: must be at least 1")
    if options.json and not options.json.parent.is_dir():
        raise ConfigError(f"--json={options.json}: there is no folder {options.json.parent}; create it first")
    results = evaluate(options)
    for task, metrics in results.items():
        values = {name: value for name, value in metrics.items() if isinstance(value, float)}
        print("\n".join(f"{task}  {name} {value:.6f}" for name, value in values.items()))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
