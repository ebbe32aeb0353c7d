"""Submits a run to Slurm, with the same options as run_train.sh and those of [launch], [slurm].

    python scripts/slurm/submit.py --job.config_file=FILE --launch.nodes=4 --training.steps=1000
    python scripts/slurm/submit.py --job.config_file=FILE --dry-run  # prints the batch script

Validates the configuration first. All nodes must share this package, its Python and the run's folder.
"""

import os
import subprocess
import sys
from pathlib import Path

from torchtitan_clone.commands.parsing import build_parser
from torchtitan_clone.config import Config, ConfigError, load_run_config
from torchtitan_clone.config.started import DEFAULT_CONFIG, as_started
from torchtitan_clone.launch.slurm_script import batch_script, check_cluster, processes_per_node
from torchtitan_clone.observe.outputs import reports_errors
from torchtitan_clone.run import preflight
from torchtitan_clone.torchft.lighthouse import parse_lighthouse_address


@reports_errors
def main(words: list[str]) -> int:
    """Prints or submits the batch script; returns exit code 2 for an invalid configuration."""
    _, words = build_parser(__doc__).parse_known_args(words)
    config = load_run_config(words, default=str(DEFAULT_CONFIG))
    folder = validated_folder(config)
    arguments = job_arguments(words, config)
    script = batch_script(config, folder=folder, python=sys.executable, arguments=arguments)
    if config.job.dry_run:
        sys.stdout.write(script)
        return 0
    return submit(script, folder=folder)


def validated_folder(config: Config) -> Path:
    """Returns the run's folder; raises ConfigError if the run cannot start on the requested nodes."""
    check_cluster(config)
    launch = config.launch
    if config.fault_tolerance.enable:
        lighthouse = {**os.environ, **launch.environment}.get("TORCHFT_LIGHTHOUSE")
        if not lighthouse:
            raise ConfigError(
                "fault_tolerance.enable = true: $TORCHFT_LIGHTHOUSE is not set; "
                f"{as_started('start scripts/lighthouse.py')} on a host that all nodes can reach, and set the variable "
                "to the address that it prints"
            )
        parse_lighthouse_address(str(lighthouse))
    device_type = "cuda" if launch.gpus_per_node else "cpu"
    world_size = launch.nodes * processes_per_node(launch)
    return preflight.resolve(config, world_size=world_size, device_type=device_type).folder.resolve()


def job_arguments(argv: list[str], config: Config) -> list[str]:
    """Returns the arguments of the job: not those of a dry run, and with an absolute path of the configuration file."""
    words = [word for word in argv if word != "--dry-run"]
    if any(word.startswith(("--job.dry_run", "--dry-run=", "--all", "--device")) for word in words):
        words += ["--job.dry_run=false", "--job.dry_run_all=false", "--job.dry_run_device=auto"]
    return [*words, f"--job.config_file={Path(config.job.config_file or '').resolve()}"]


def submit(script: str, *, folder: Path) -> int:
    """Saves the script beside the job's logs and passes it to sbatch; returns the exit code."""
    logs = folder / "slurm"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "job.sbatch").write_text(script)
    except OSError as error:
        raise ConfigError(f"cannot write to {logs}: {error.strerror}; set job.dump_folder to a writable one") from None
    try:
        return subprocess.run(["sbatch", logs / "job.sbatch"], check=False).returncode
    except OSError as error:
        raise ConfigError(f"sbatch cannot be run here: {error.strerror}; submit from a login node") from None
