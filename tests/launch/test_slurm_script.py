"""The batch script that scripts/slurm/submit.py prints; needs no cluster."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.marks import needs_door
from tests.support.runs import options

REPOSITORY = Path(__file__).parents[2]
REPLICA_GROUPS = {
    "fault_tolerance__enable": True,
    "fault_tolerance__group_size": 3,
    "slurm__nodes": 1,
    "slurm__gpus_per_node": 1,
    "training__global_batch_size": 12,
}


@pytest.fixture
def submit(corpus, tmp_path, python):
    """Runs submit.py --dry-run with these options on top of a minimal run."""
    file = tmp_path / "empty.toml"
    file.write_text("")
    folder = tmp_path / "runs"

    def run(*, lighthouse: str = "", **changes: object) -> subprocess.CompletedProcess[str]:
        sizes = {"training__local_batch_size": 2, "training__steps": 100, "checkpoint__interval": 20}
        argv = options(corpus, folder, job__config_file=file, **(sizes | changes))
        command = [python, REPOSITORY / "scripts" / "slurm" / "submit.py", *argv, "--dry-run"]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TORCHFT_LIGHTHOUSE": lighthouse}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    yield run
    assert not folder.exists()  # a dry run writes nothing


def test_options_appear_in_the_batch_script(submit):
    done = submit(
        slurm__nodes=2,
        slurm__gpus_per_node=4,
        slurm__partition="long",
        slurm__account="physics",
        slurm__time="2-00:00:00",
        slurm__container="apptainer exec --nv image.sif",
        slurm__environment='{NCCL_DEBUG = "WARN"}',
        slurm__setup='["module load cuda"]',
        slurm__sbatch_options='["--constraint=h100"]',
        training__global_batch_size=16,
    )
    assert done.returncode == 0, done.stderr
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --exclusive",
        "#SBATCH --partition=long",
        "#SBATCH --account=physics",
        "#SBATCH --time=2-00:00:00",
        "#SBATCH --signal=USR1@120",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --constraint=h100",
        "export NGPU=4",
        "export CONTAINER='apptainer exec --nv image.sif'",
        "export NCCL_DEBUG=WARN",
        "module load cuda",
    ):
        assert line in done.stdout.splitlines()
    assert "--dry-run" not in done.stdout
    assert "--array" not in done.stdout


@pytest.mark.parametrize("word", ["job__dry_run", "job__dry_run_all"])
def test_the_job_is_no_dry_run(submit, word):
    script = submit(**{word: True}, training__global_batch_size=16).stdout
    given = dict(re.findall(r"--job\.(dry_run\w*)=(\w+)", script))  # of a repeated option the last one holds
    assert given == {"dry_run": "false", "dry_run_all": "false", "dry_run_device": "auto"}


@pytest.mark.parametrize(("sbatch", "reason"), [(None, "No such file"), ("#!/bin/sh", "Permission denied")])
def test_sbatch_that_cannot_be_run_is_one_error(corpus, tmp_path, python, sbatch, reason):
    if sbatch:
        (tmp_path / "sbatch").write_text(sbatch)
    argv = options(corpus, tmp_path / "runs", training__local_batch_size=2, training__global_batch_size=16)
    command = [python, REPOSITORY / "scripts" / "slurm" / "submit.py", *argv]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "PATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: sbatch cannot be run here: {reason}")


def test_a_percent_sign_in_a_path_is_no_pattern_of_slurm(submit, tmp_path):
    done = submit(job__run_name="at 50%j", slurm__time="1:00:00", training__global_batch_size=16)
    assert f"#SBATCH --output='{tmp_path}/runs/at 50%%j/slurm/%j.log'" in done.stdout, done.stderr


@needs_door("torchft")
def test_replica_groups_are_array_tasks(submit):
    done = submit(lighthouse="http://login1:29510", **REPLICA_GROUPS)
    assert "#SBATCH --array=0-2" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("lighthouse", "problem"),
    [("", "$TORCHFT_LIGHTHOUSE is not set"), ("login1:29510", "login1:29510: must be an address")],
)
@needs_door("torchft")
def test_invalid_lighthouse_address_is_a_configuration_error(submit, lighthouse, problem):
    done = submit(lighthouse=lighthouse, **REPLICA_GROUPS)
    assert done.returncode == 2
    assert problem in done.stderr


def test_invalid_run_is_rejected_before_submission(submit):
    done = submit(slurm__nodes=3, slurm__gpus_per_node=4)
    assert done.returncode == 2
    assert "global_batch_size" in done.stderr
