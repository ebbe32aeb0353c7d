"""Tests of launch/slurm_job.sh on a real Slurm with two nodes on this machine: preemption, time limits, resuming."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.slurm_cluster import INSTALL, Cluster, missing_commands
from tests.marks import needs_door
from tests.support.runs import losses, options, train, wait_for_step

REPOSITORY = Path(__file__).parents[2]
STEPS = 100
CPUS = {"slurm__nodes": 2, "slurm__gpus_per_node": 0, "slurm__processes_per_node": 2, "slurm__cpus_per_node": 2}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if missing := missing_commands():
        pytest.skip(f"Slurm is not installed (no {', '.join(missing)}); as root: {INSTALL}")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=2, cpus=2)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def expected(corpus, tmp_path_factory):
    """Returns the losses of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert train(run_options(corpus, folder), world_size=4, log_folder=folder)[0] == 0
    return losses(folder)


def run_options(corpus, folder, **changes):
    """Returns options of a run that does not use debug_model.toml."""
    file = corpus.parent / "empty.toml"
    file.write_text("")
    sizes = {"training__local_batch_size": 2, "training__steps": STEPS, "checkpoint__interval": 20}
    return options(corpus, folder, job__config_file=file, **(sizes | changes))


def submit(cluster, argv, *words):
    """Runs submit.py as a user does; returns its output."""
    command = [sys.executable, REPOSITORY / "scripts" / "slurm" / "submit.py", *argv, *words]
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return cluster.run(*map(str, command), environment=environment)


class Job:
    """A submitted run."""

    def __init__(self, cluster, corpus, folder, **changes):
        self.cluster, self.folder = cluster, folder
        answer = submit(cluster, run_options(corpus, folder, **(CPUS | changes)))
        self.id = re.fullmatch(r"Submitted batch job (\d+)", answer)[1]

    def preempt(self, *, after: int, signal: str) -> None:
        """Sends the signal after a step, and waits until the job is requeued."""
        self.cluster.wait_for_state(self.id, "RUNNING", 30)
        wait_for_step(self.folder, after)
        self.cluster.run("scancel", f"--signal={signal}", self.id)
        self.cluster.wait_for(lambda: "; requeued" in self.log.rpartition("start ")[2], 60)

    def finish(self, state: str = "COMPLETED", timeout: float = 90) -> str:
        """Waits for the state; returns the job's log."""
        self.cluster.wait_for_state(self.id, state, timeout)
        return self.log

    @property
    def log(self) -> str:
        file = self.folder / "run" / "slurm" / f"{self.id}.log"
        return file.read_text() if file.exists() else ""


def test_preempted_job_saves_requeues_and_resumes_bit_identically(cluster, corpus, tmp_path, expected):
    job = Job(cluster, corpus, tmp_path)
    job.preempt(after=5, signal="USR1")
    log = job.finish()
    assert "stopped by SIGUSR1: step" in log
    assert re.findall(r"start (\d) after step (\d+)", log)[0] == ("1", "0")
    assert [int(step) > 4 for step in re.findall(r"start 2 after step (\d+)", log)] == [True]
    assert f"training is complete: step {STEPS} of {STEPS}" in log
    assert losses(tmp_path) == expected
    logs = tmp_path / "run" / "slurm"
    assert len(list(logs.glob(f"{job.id}.1/node1/*/*/1/stdout.log"))) == 1  # of the second start, rank 3


@pytest.mark.slow
def test_three_preemptions_in_a_row(cluster, corpus, tmp_path, expected):
    job = Job(cluster, corpus, tmp_path)
    for after, signal in ((5, "USR1"), (30, "USR2"), (60, "TERM")):
        job.preempt(after=after, signal=signal)
    job.finish()
    assert losses(tmp_path) == expected


@pytest.mark.slow
def test_job_resumes_after_preemption_by_priority(cluster, corpus, tmp_path, expected):
    job = Job(cluster, corpus, tmp_path)
    cluster.wait_for_state(job.id, "RUNNING", 30)
    wait_for_step(tmp_path, 5)
    cluster.run("sbatch", "--partition=high", "--nodes=2", "--exclusive", f"--output={tmp_path}/high", "--wrap=sleep 1")
    cluster.wait_for((tmp_path / "high").exists, 60)
    log = job.finish()
    assert "stopped by SIGTERM: step" in log
    assert losses(tmp_path) == expected


@pytest.mark.slow
def test_job_restarts_after_a_node_failure(cluster, corpus, tmp_path, expected):
    job = Job(cluster, corpus, tmp_path)
    cluster.wait_for_state(job.id, "RUNNING", 30)
    wait_for_step(tmp_path, 30)
    cluster.kill_node("n2")
    cluster.wait_for_state(job.id, "PENDING", 90)
    cluster.start_node("n2")
    log = job.finish()
    assert int(re.findall(r"start 2 after step (\d+)", log)[0]) >= 20
    assert losses(tmp_path) == expected


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_job_is_requeued_before_its_time_limit(cluster, corpus, tmp_path):
    changes = {"slurm__time": "1", "slurm__signal_seconds": 20}
    job = Job(cluster, corpus, tmp_path, **changes, training__steps=100_000, metrics__log_freq=100)
    cluster.wait_for_state(job.id, "RUNNING", 30)
    # Slurm counts in minutes.
    cluster.wait_for(lambda: "; requeued" in job.log, 200)
    assert "stopped by SIGUSR1: step" in job.log
    cluster.run("scancel", job.id)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_job_without_advance_signal_saves_at_its_time_limit(cluster, corpus, tmp_path):
    changes = {"slurm__time": "1", "training__steps": 100_000, "metrics__log_freq": 100, "slurm__signal_seconds": 30}
    job = Job(cluster, corpus, tmp_path, **changes, slurm__sbatch_options='["--signal=USR1@65535"]')
    cluster.wait_for_state(job.id, "RUNNING", 30)
    cluster.wait_for(lambda: "; requeued" in job.log, 200)
    assert "stopped by SIG" in job.log
    cluster.run("scancel", job.id)


@pytest.mark.slow
def test_cancelled_job_is_not_requeued(cluster, corpus, tmp_path):
    job = Job(cluster, corpus, tmp_path)
    cluster.wait_for_state(job.id, "RUNNING", 30)
    wait_for_step(tmp_path, 5)
    cluster.run("scancel", job.id)
    cluster.wait_for(lambda: "not requeued: Slurm is terminating the job" in job.log, 60)
    assert "stopped by SIGTERM: step" in job.log
    cluster.wait_for_state(job.id, "CANCELLED", 30)


@pytest.mark.slow
def test_job_without_progress_is_requeued_a_limited_number_of_times(cluster, corpus, tmp_path):
    changes = {"training__max_seconds": 0.001, "slurm__max_starts_without_progress": 2}
    job = Job(cluster, corpus, tmp_path, **changes)
    log = job.finish("FAILED")
    assert log.count("before the first step") == 2
    assert "not requeued: 2 consecutive starts without a checkpoint after step 0" in log


@pytest.mark.slow
@needs_door("torchft")
def test_job_array_is_one_run_of_replica_groups(cluster, corpus, tmp_path, expected):
    python, both = [sys.executable, "-u"], "--fault_tolerance.min_replica_size=2"
    command = [*python, REPOSITORY / "scripts" / "lighthouse.py", "--port=0", both]
    lighthouse = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert lighthouse.stdout is not None
        address = lighthouse.stdout.readline().partition("=")[2].strip()
        groups = {"enable": True, "group_size": 2, "min_replica_size": 2}
        job = Job(
            cluster, corpus, tmp_path, slurm__nodes=1, slurm__environment=f'{{TORCHFT_LIGHTHOUSE = "{address}"}}',
            **{f"fault_tolerance__{key}": value for key, value in groups.items()},
        )  # fmt: skip
        watched = tmp_path / "watched"
        watched.mkdir()
        (watched / "run").symlink_to(tmp_path / "run" / "replica-0")
        wait_for_step(watched, 10)
        assert cluster.kill({"SLURM_ARRAY_TASK_ID=1"}, command="torchtitan_clone.train") == 2
        for task in (1, 0):
            cluster.wait_for_state(f"{job.id}_{task}", "COMPLETED", 120)
    finally:
        lighthouse.kill()
    assert losses(watched) == pytest.approx(expected, rel=1e-4)
    logs = [file.read_text() for file in (tmp_path / "run" / "slurm").glob("*.log")]
    assert sorted(re.findall(r": start (\d) after", log) for log in logs) == [["1"], ["1", "2"]]
