"""What a machine is measured to reach becomes a table that the planner reads.

Runs scripts/measure_hardware.py, too.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import run_ranks
from torchtitan_clone.commands import measure_hardware as command
from torchtitan_clone.planner.hardware import read_hardware
from torchtitan_clone.planner.measure import best_seconds, measure_hardware, measure_links, to_toml

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_hardware.py"


def test_a_measured_table_is_read_as_it_was_written(tmp_path):
    cpu = torch.device("cpu")  # of which everything but the memory is measured as of a GPU
    table = measure_hardware(
        cpu, name="small", memory_gib=8.04, node_size=2, links=(3.0, 2.5), sizes=(32, 128), repeats=1
    )
    (tmp_path / "mine.toml").write_text(to_toml(table))
    assert read_hardware(str(tmp_path / "mine.toml")) == table
    assert (table.memory_gib, table.link_us, table.network_gbps) == (8.0, 3.0, 2.5)
    assert [size for size, _ in table.products] == [32, 128]
    x, y = (torch.ones(128, 128, dtype=torch.bfloat16) for _ in range(2))
    seconds = best_seconds(lambda: torch.mm(x, y), device=cpu)
    assert 0.05 < table.products[1][1] * 1e12 * seconds / (2 * 128**3) < 20  # other processes run meanwhile


def links() -> tuple[float, float]:
    dist.init_process_group("gloo")
    return measure_links()


def test_links_are_measured_between_ranks():
    us, gbps = run_ranks(links, 2)[0]
    assert 0 < us < 1e6
    assert 0 < gbps < 1000


def test_a_missing_folder_of_the_table_is_an_error_before_measuring(tmp_path, capsys):
    file = tmp_path / "missing" / "mine.toml"
    assert command.main([str(file), "--rounds=0"]) == 2
    assert capsys.readouterr() == ("", f"error: {file}: there is no folder {file.parent}; create it first\n")


def test_a_machine_is_measured_at_least_once(tmp_path, capsys):
    assert command.main([str(tmp_path / "mine.toml"), "--rounds=0"]) == 2
    assert re.fullmatch("error: --rounds=0 must be at least 1 and --ranks=. at least 0\n", capsys.readouterr().err)
    assert command.main([str(tmp_path), "--ranks=0"]) == 2
    assert capsys.readouterr() == ("", f"error: {tmp_path}: is a folder; name a file\n")


@pytest.mark.parametrize("words", [[], ["--ranks=0"], ["--ranks=3"]])
def test_a_machine_without_a_gpu_is_an_error(words, tmp_path, python):
    command = [python, SCRIPT, tmp_path / "mine.toml", *words]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    error = r"error: --ranks=\d: 0 GPUs are visible, and only GPUs are measured; run this where they are, or write .*\n"
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(error, done.stderr)
