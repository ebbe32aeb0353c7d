"""Runs of any number of ranks are simulated in one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.parity_matrix import LATENT, MOE
from tests.support.runs import options, train

TOKENIZER = Path(__file__).parents[2] / "torchtitan_clone" / "data" / "assets" / "stdlib_tokenizer"


@pytest.mark.many_ranks
def test_simulated_collectives_equal_those_of_a_real_run(corpus, tmp_path):
    axes = {
        **MOE,
        "model__args__moe__sequence_balance": 0.1,
        # A simulated run sends each rank equally many rows.
        "debug__moe_force_load_balance": True,
        "parallelism__expert_parallel_degree": 2,
        "parallelism__tensor_parallel_degree": 2,
        "training__global_batch_size": 8,
        "debug__trace_collectives": True,
    }
    real = options(corpus, tmp_path, training__steps=3, **axes)
    code, output = train(real, world_size=4, log_folder=tmp_path)
    assert code == 0, output
    simulated = [*real, "--comm.mode=fake_backend", f"--job.dump_folder={tmp_path / 'other'}"]
    code, text = train(simulated, log_folder=tmp_path, env={"WORLD_SIZE": "4"})
    assert code == 0, text

    def table(text):
        """Returns the lines of collectives, which a real run logs with the time."""
        lines = [match[1] for match in re.finditer(r"(?m)(?:^|:\d\d )((?:fsdp|tp|ep|expert_fsdp) .*)", text)]
        return {" ".join(line.split()) for line in lines}

    assert {line.split()[0] for line in table(text)} == {"fsdp", "tp", "ep", "expert_fsdp"}
    assert table(text) <= table(output)
    assert {line.split()[0] for line in table(output) - table(text)} <= {"tp"}
    assert not (tmp_path / "other").exists()


def test_experts_are_simulated(corpus, tmp_path):
    """On a mesh with an axis for experts, of which a real run waits for the counts of rows of all ranks."""
    axes = {
        "parallelism__expert_parallel_degree": 4, "parallelism__pipeline_parallel_degree": 2,
        "parallelism__pipeline_parallel_schedule": "Interleaved1F1B", "comm__mode": "fake_backend",
    }  # fmt: skip
    argv = options(corpus, tmp_path, **LATENT, **axes, model__args__n_layers=4, training__global_batch_size=16)
    code, text = train(argv, log_folder=tmp_path, env={"WORLD_SIZE": "8"})
    assert code == 0, text
    assert "8 ranks = pp 2 x dp_shard 4; experts: ep 4 x expert_fsdp 1" in text
    # 3 of 4 layers have 8 experts with 3 x 64 x 64 parameters each, of which 2 process a token.
    found = re.search(r"parameters +([\d,]+), of which ([\d,]+) process each token", text)
    total, active = (int(number.replace(",", "")) for number in found.groups())
    assert total - active == 3 * 6 * 3 * 64 * 64
    calls = {
        (axis, kind, layer): int(count)
        for axis, kind, layer, count in re.findall(r"^(\w+) +(\w+) +(\S+(?: \S+)*?) +(\d+) ", text, re.MULTILINE)
    }
    # Of 4 micro-batches in a layer with experts: counts and rows there, rows back, in backward rows alone.
    assert calls["ep", "all_to_all", "layers.*.feed_forward.experts"] == 4 * (3 + 2)
    assert calls["fsdp", "all_gather", "layers.*"] == 2
    assert ("fsdp", "all_gather", "optimizer and loss") not in calls


@pytest.mark.many_ranks
def test_layers_of_llama_405b_on_512_ranks():
    """Simulates tensor 8, pipeline 8, data 8, as the shipped file has it, with 14 of its 126 layers, within 4 GiB."""
    config = Path(__file__).parents[2] / "train_configs" / "llama3_405b.toml"
    argv = [f"--job.config_file={config}", "--comm.mode=fake_backend", f"--model.hf_assets_path={TOKENIZER}"]
    argv.append("--model.args.n_layers=14")
    process = subprocess.Popen(
        [sys.executable, "-m", "torchtitan_clone.train", *argv],
        env={**os.environ, "WORLD_SIZE": "512"},
        stdout=subprocess.PIPE,
        text=True,
    )
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, text
    assert usage.ru_maxrss < 4 * 2**20
    assert "48,830,562,304" in text
    assert "one forward and backward of 8 sequences" in text
    ranks = re.findall(r"^ +\d +([\d,]+)(?: +[\d.]+){9}  most: \w+$", text, re.MULTILINE)
    assert len(ranks) == 8
    assert sum(int(size.replace(",", "")) for size in ranks) == 48_830_562_304
    # One of 14 blocks on this stage, 8 micro-batches. A block sums two outputs in forward, two gradients in backward,
    # and one output again in the recomputation, which ends before the second.
    calls = re.findall(r"^tp +reduce_scatter +layers\S+ +(\d+) ", text, re.MULTILINE)
    assert sum(map(int, calls)) == 8 * 5
