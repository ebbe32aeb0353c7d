"""slurm_script.py refuses a job with more nodes than the cluster; a stand-in for sinfo answers as Slurm does."""

import os
from pathlib import Path

import pytest

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Config
from torchtitan_clone.config.schema_cluster import Cluster, Slurm
from torchtitan_clone.launch.slurm_script import check_cluster


def test_a_job_larger_than_the_cluster_is_not_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for Slurm's program answers as Slurm does: one line per partition and state of its nodes."""
    program = tmp_path / "sinfo"
    program.write_text("#!/bin/sh\nprintf 'debug* 1\\ndebug* 1\\nlong 4\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for nodes, slurm in ((2, Slurm()), (4, Slurm(partition="long")), (9, Slurm(sbatch_options=["--partition=x"]))):
        check_cluster(Config(launch=Cluster(nodes=nodes), slurm=slurm))
    for nodes, partition in ((3, None), (5, "long"), (5, "debug,long")):
        with pytest.raises(ConfigError, match=f"launch.nodes = {nodes}: the .*partition.* has . nodes"):
            check_cluster(Config(launch=Cluster(nodes=nodes), slurm=Slurm(partition=partition)))
    program.write_text("#!/bin/sh\nexit 1\n")
    check_cluster(Config(launch=Cluster(nodes=1000)))  # sbatch tells what is wrong
