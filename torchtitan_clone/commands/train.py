"""Trains a model: starts one process per GPU of this node, or one on a CPU.

The words are options of a run, after the name of its file if there is one. run_train.sh describes the environment
variables; --help lists the options.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.reader import with_file
from torchtitan_clone.config.started import DEFAULT_CONFIG, shipped_configs
from torchtitan_clone.observe.outputs import print_error
from torchtitan_clone.train import exit_process

TRAIN = "torchtitan_clone.train"


def main(words: list[str]) -> int:
    """Starts the processes of this node, and returns the exit code; does not return where this process trains."""
    if {"--help", "-h"} & {*words}:
        exit_process(words)
    try:
        module, words = _train_file(), _with_comm_mode(_with_option(words))
        _check_ignored()
        processes, nodes = _count("NGPU", default=count_gpus() or 1), _count("NNODES", default=1)
    except ConfigError as error:
        print_error(error)
        return 2
    words = with_file(words, default=str(DEFAULT_CONFIG))
    if processes == nodes == 1:
        if module == TRAIN:
            exit_process(words)
        os.execv(sys.executable, [sys.executable, "-m", module, *words])
    from torchtitan_clone.launch.torchrun import launch

    return launch([*launcher_options(processes=processes, nodes=nodes, module=module), *words])


def launcher_options(*, processes: int, nodes: int, module: str) -> list[str]:
    """Returns the options of launch/torchrun.py that these and further environment variables stand for."""
    values = {"nproc-per-node": str(processes), "log-rank": os.environ.get("LOG_RANK") or "0"}
    if nodes > 1:
        values |= {"nnodes": str(nodes), "node-rank": os.environ.get("NODE_RANK", "")}
        values |= {"master-addr": os.environ.get("MASTER_ADDR", ""), "master-port": os.environ.get("MASTER_PORT", "")}
    values |= {"train-file": module if module != TRAIN else "", "log-folder": os.environ.get("LOG_FOLDER", "")}
    return [f"--{name}={value}" for name, value in values.items() if value]


def _with_option(words: list[str]) -> list[str]:
    """Returns the words, with an option in place of a first one that names a configuration file."""
    if not words or words[0].startswith("-"):
        return words
    is_file = words[0].endswith(".toml") or words[0] in shipped_configs() or os.path.isfile(words[0])
    return [f"--job.config_file={words[0]}", *words[1:]] if is_file else words


def _with_comm_mode(words: list[str]) -> list[str]:
    mode = os.environ.get("COMM_MODE") or "default"
    if mode == "local_tensor":
        remedy = "set it to fake_backend to simulate, or unset it to start NGPU processes, which need no GPUs"
        raise ConfigError(f"COMM_MODE = local_tensor: is not supported; {remedy}")
    if mode not in ("default", "fake_backend"):
        raise ConfigError(f"COMM_MODE = {mode}: must be default or fake_backend; change or unset it")
    return words if mode == "default" else [*words, f"--comm.mode={mode}"]


def _train_file() -> str:
    module = os.environ.get("TRAIN_FILE") or TRAIN
    if module.partition(".")[0] == "torchtitan":
        raise ConfigError(f"TRAIN_FILE = {module}: belongs to torchtitan; unset it")
    if "/" in module or module.endswith(".py") or module.startswith("-"):
        rule = "must be a module, such as my_package.train, which python -m starts"
        raise ConfigError(f"TRAIN_FILE = {module}: {rule}")
    return module


def _check_ignored() -> None:
    """Notes variables of torchtitan that are not read; ConfigError for an allocator that there is not."""
    if (allocator := os.environ.get("ALLOCATOR") or "default") != "default":
        raise ConfigError(f"ALLOCATOR = {allocator}: must be default; change or unset it")
    if not os.environ.get("CONFIG_FILE") and os.environ.get("MODULE") and os.environ.get("CONFIG"):
        text = "MODULE and CONFIG of torchtitan are not read; set CONFIG_FILE to a TOML file"
        sys.stderr.write(f"note: {text}\n")


def _count(name: str, *, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        raise ConfigError(f"{name} = {text}: must be an integer of at least 1; change or unset it")
    return int(text)


def count_gpus() -> int:
    """Returns the number of GPUs that processes of this node may use, without the seconds of importing torch."""
    present = sum(1 for path in Path("/dev").glob("nvidia[0-9]*"))
    if not present and shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
        present = sum(line.startswith("GPU") for line in listed.splitlines())
    elif not present and Path("/dev/kfd").exists():  # AMD
        present = sum(1 for path in Path("/dev/dri").glob("renderD*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, 0 if visible in ("", "-1") else len(visible.split(",")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
