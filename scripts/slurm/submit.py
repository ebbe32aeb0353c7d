"""Submits a run to Slurm; takes the same options as the run, [slurm] among them.

    python scripts/slurm/submit.py --job.config_file=FILE --slurm.nodes=4 --training.steps=1000
    python scripts/slurm/submit.py --job.config_file=FILE --dry-run     # prints the batch script

Everything is checked before anything is queued. The repository, the Python that runs this and the run's folder must be
on a file system that all nodes share. What the job does stands in scripts/slurm/job.sh.
"""

import os
import subprocess
import sys
from pathlib import Path

from torchtitan_clone.config import Config, ConfigError, load_config
from torchtitan_clone.fault_tolerance.lighthouse import parse_lighthouse_address
from torchtitan_clone.launch.slurm_script import batch_script, processes_per_node
from torchtitan_clone.run import preflight

REPOSITORY = Path(__file__).resolve().parents[2]


def main(argv: list[str]) -> int:
    """Prints or submits the batch script; exit code 2 where the configuration is wrong."""
    default = os.environ.get("CONFIG_FILE", str(REPOSITORY / "train_configs" / "debug_model.toml"))
    try:
        config = load_config(argv)
        if config.job.config_file is None:
            config = load_config([*argv, f"--job.config_file={default}"])
        folder = checked_folder(config)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    script = batch_script(
        config, folder=folder, repository=REPOSITORY, python=sys.executable, arguments=job_arguments(argv, config)
    )
    if config.job.dry_run:
        print(script, end="")
        return 0
    return submit(script, folder=folder)


def checked_folder(config: Config) -> Path:
    """The run's folder, if the run can start on so many ranks; ConfigError where it cannot."""
    slurm = config.slurm
    lighthouse = {**os.environ, **slurm.environment}.get("TORCHFT_LIGHTHOUSE")
    if config.fault_tolerance.enable and not lighthouse:
        raise ConfigError(
            "fault_tolerance.enable: $TORCHFT_LIGHTHOUSE is not set, at which the replica groups meet; start "
            "scripts/lighthouse.py where all nodes reach it, and set the variable to the address that it prints"
        )
    if config.fault_tolerance.enable:
        parse_lighthouse_address(str(lighthouse))
    device_type = "cuda" if slurm.gpus_per_node else "cpu"
    plan = preflight.resolve(config, world_size=slurm.nodes * processes_per_node(slurm), device_type=device_type)
    return plan.folder.resolve()


def job_arguments(argv: list[str], config: Config) -> list[str]:
    """The arguments of the job: --dry-run is for us, and the file is found from wherever the job starts."""
    file = Path(config.job.config_file or "").resolve()
    return [*(word for word in argv if word != "--dry-run"), f"--job.config_file={file}"]


def submit(script: str, *, folder: Path) -> int:
    """Hands the script to sbatch, and keeps it beside the logs of the job."""
    logs = folder / "slurm"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "job.sbatch").write_text(script)
    except OSError as error:
        sys.stderr.write(f"error: cannot write to {logs}: {error.strerror}; set job.dump_folder\n")
        return 2
    try:
        return subprocess.run(["sbatch", logs / "job.sbatch"], check=False).returncode
    except FileNotFoundError:
        sys.stderr.write("error: there is no sbatch on this machine; submit where Slurm is installed\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
