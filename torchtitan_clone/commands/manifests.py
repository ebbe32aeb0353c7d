"""What commands that write a run for a cluster have in common."""

import sys
from pathlib import Path, PurePosixPath
from typing import cast

import yaml

from torchtitan_clone.config import Config, ConfigError
from torchtitan_clone.config.checks import find_config_errors
from torchtitan_clone.config.messages import shown
from torchtitan_clone.config.resolved import find_mesh_errors
from torchtitan_clone.config.started import as_started
from torchtitan_clone.config.urls import local_path
from torchtitan_clone.files import write_atomically
from torchtitan_clone.launch.slurm_script import processes_per_node
from torchtitan_clone.run.early import check_without_torch


def check_for_containers(config: Config) -> None:
    """Raises ConfigError with what is wrong on every machine; what is only in the cluster is checked there."""
    launch, folder = config.launch, config.job.dump_folder
    check_without_torch(config)
    problems = list(find_config_errors(config, device_type="cuda" if launch.gpus_per_node else "cpu"))
    if config.fault_tolerance.enable:
        rule = as_started("replica groups are started by scripts/slurm/submit.py")
        problems.append(f"fault_tolerance.enable = true: {rule}; set it to false")
    in_volume = any(PurePosixPath(folder).is_relative_to(path) for path in launch.volumes)
    if not in_volume and local_path(config.checkpoint.folder) is not None:
        rule = "is in no volume of launch.volumes, and checkpoints would be lost with the node"
        remedy = "add one, or set checkpoint.folder to an object store"
        problems.append(f"job.dump_folder = {shown(folder)}: {rule}; {remedy}")
    problems += find_mesh_errors(config.parallelism, launch.nodes * processes_per_node(launch))
    if problems:
        raise ConfigError(problems)


def write_yaml(documents: list[dict[str, object]], *, file: Path, command: str, prints: bool) -> None:
    """Prints the documents, or writes them to a file and prints the command that submits it."""
    text = cast("str", yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000))
    if prints:
        sys.stdout.write(text)
        return
    write_atomically(file, text.encode())
    print(f"wrote {file}; submit it by: {command} {file}")


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
