"""What users call: `torchtitan_clone COMMAND` where the package is installed, scripts/*.py in a checkout.

- A *command* is a module here, whose `main(words)` parses the words after its name and returns the exit code.
- A *script* is the file of a checkout that calls a command (`run_script`); `config/started.py` has the name of each.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

from torchtitan_clone import __version__
from torchtitan_clone.config.messages import ConfigError, did_you_mean
from torchtitan_clone.config.started import SCRIPTS, VARIABLE, reinstall
from torchtitan_clone.observe.outputs import print_error

SUMMARIES = {
    "train": "trains: [FILE] --table.key=value ...; without a file, a small model on Python's source code",
    "plan": "searches the fastest mesh for a model on a number of GPUs",
    "report": "draws a report of runs as one HTML page",
    "generate": "continues prompts",
    "evaluate": "runs tasks of lm-evaluation-harness",
    "prepare": "tokenizes the data of a run before it starts",
    "predict": "stores what a teacher predicts for the data of a run",
    "inspect": "shows what a run trains on",
    "checkpoint": "lists, verifies, shows and deletes checkpoints",
    "convert from_hf": "makes a checkpoint of a folder in the format of the Hugging Face hub",
    "convert to_hf": "makes such a folder of a checkpoint",
    "convert from_dcp": "makes a checkpoint of one that torchtitan has saved",
    "convert from_nanogpt": "makes a checkpoint of a ckpt.pt of nanoGPT",
    "serve_check": "compares such a folder with what engines make of it",
    "convert tokenizer": "makes tokenizer.json of a model of SentencePiece",
    "average": "averages the weights of checkpoints",
    "tokenizer": "trains a tokenizer",
    "lighthouse": "runs the server through which replica groups find each other",
    "measure": "measures the GPUs of this machine for `plan`",
    "coord_check": "shows how activations grow with the width of a model",
    "submit": "submits a run to Slurm",
    "kubernetes": "writes a run for Kubernetes",
    "skypilot": "writes a run for SkyPilot",
}
MODULES = {name: Path(SCRIPTS[name]).stem if name != "train" else "train" for name in SUMMARIES}
"""The module of each command in this package."""


def main(words: list[str] | None = None) -> int:
    """Runs the command that the words name, by default those of the command line; returns the exit code."""
    words = sys.argv[1:] if words is None else words
    os.environ.setdefault(VARIABLE, "1")
    if not words or words[0] in ("--help", "-h"):
        sys.stdout.write(_help())
        return 0 if words else 2
    if words[0] == "--version":
        sys.stdout.write(f"torchtitan_clone {__version__}\n")
        return 0
    name = next((" ".join(words[:count]) for count in (2, 1) if " ".join(words[:count]) in SUMMARIES), None)
    if name is None:
        known = [each for each in SUMMARIES if each.split()[0] == words[0]] or list(SUMMARIES)
        text = " ".join(words[: len(known[0].split())])
        print_error(ConfigError(f"torchtitan_clone {text}: no such command{did_you_mean(text, known)}"))
        return 2
    return _run(name, words[len(name.split()) :])


def run_script(path: str) -> int:
    """Runs the command of a script with the words of the command line; returns the exit code."""
    name = next(name for name, module in MODULES.items() if module == Path(path).stem)
    return _run(name, sys.argv[1:], program=Path(path).name)


def _run(name: str, words: list[str], *, program: str = "") -> int:
    sys.argv[0] = program or f"torchtitan_clone {name}"  # of which usage messages take the last part
    try:
        module = import_module(f"torchtitan_clone.commands.{MODULES[name]}")
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("torchtitan_clone"):
            raise
        print_error(f"the package {error.name} is not installed in {sys.executable}; {reinstall()}")
        return 2
    return module.main(words)


def _help() -> str:
    lines = "".join(f"  {name:<21}{text}\n" for name, text in SUMMARIES.items())
    return f"usage: torchtitan_clone COMMAND ...\n\n{lines}\ntorchtitan_clone COMMAND --help describes a command.\n"
