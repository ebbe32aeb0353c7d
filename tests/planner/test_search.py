"""scripts/plan.py finds meshes that fit, prints TOML that a run accepts, and says what is wrong with its options."""

import re
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from torchtitan_clone.commands import plan
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.planner.hardware import read_hardware
from torchtitan_clone.planner.search import SearchGoal, describe_mesh_options, describe_plans, search
from torchtitan_clone.run import preflight

ROOT = Path(__file__).parents[2]
DEBUG = f"--job.config_file={ROOT / 'train_configs' / 'debug_model.toml'}"


def planned(*words, gpus=8, tokens=2**17, count=3):
    return describe_plans([DEBUG, *words], gpus=gpus, hardware=read_hardware("h100"), tokens=tokens, count=count)


def test_the_lines_of_each_mesh_are_those_of_a_valid_run(tmp_path):
    text = planned("--model.flavor=8B", "--model.args.n_layers=4", "--training.seq_len=8192", tokens=2**18)
    speeds = [int(number.replace(",", "")) for number in re.findall(r"^ +\d+ +[\d.]+ +[\d.]+ +([\d,]+) ", text, re.M)]
    assert len(speeds) == 3
    assert speeds == sorted(speeds, reverse=True)
    for block in text.split("\n# ")[1:]:
        file = tmp_path / "mesh.toml"
        file.write_text(
            '[model]\nflavor = "8B"\n' + block.partition("\n")[2].replace("[training]", "[training]\nseq_len = 8192")
        )
        assert tomllib.loads(file.read_text())["training"]["global_batch_size"] == 2**18 // 8192
        plan = preflight.resolve(load_config([f"--job.config_file={file}"]), world_size=8, device_type="cuda")
        assert plan.tokens_per_step == 2**18


FILE = """
[model]
flavor = "8B"
[model.args]
n_layers = 4
[training]
seq_len = 8192
local_batch_size = 4
[activation_checkpoint]
mode = "full"
first_blocks = 1
[parallelism]
tensor_parallel_degree = 2
data_parallel_replicate_degree = 2
pipeline_parallel_schedule = "GPipe"
fsdp_reshard_after_forward = "never"
"""


def test_the_lines_override_those_of_the_file(tmp_path):
    (tmp_path / "file.toml").write_text(f"{FILE}pipeline_parallel_layers_per_stage = 1\n")
    argv = [f"--job.config_file={tmp_path / 'file.toml'}"]
    text = describe_plans(argv, gpus=8, hardware=read_hardware("h100"), tokens=2**18, count=12)
    (tmp_path / "file.toml").write_text(FILE)
    table, *blocks = re.split(r"\n# \d+\n", text)
    for row, lines in zip(re.findall(r"^ +\d+ .*", table, re.M), blocks, strict=True):
        assert "\n# without pipeline_parallel_layers_per_stage" in lines
        (tmp_path / "mesh.toml").write_text(f'[job]\nextends = "file.toml"\n{lines}')
        config = load_config([f"--job.config_file={tmp_path / 'mesh.toml'}"])
        plan = preflight.resolve(config, world_size=8, device_type="cuda")
        assert row.endswith(f" {describe_mesh_options(plan)}")
        assert plan.tokens_per_step == 2**18
        assert plan.config.activation_checkpoint.first_blocks == -1


def test_options_that_are_not_searched_stay():
    words = ("--model.flavor=8B", "--model.args.n_layers=4", "--training.seq_len=32768", "--compile.enable=true")
    options = {
        "context_parallel_rotate_method": "alltoall",
        "fsdp_prefetch_blocks": 2,
        "fsdp_blocks_per_group": 2,
        "enable_async_tensor_parallel": True,
    }
    of_run = [f"--parallelism.{key}={str(value).lower()}" for key, value in options.items()]
    # Asynchronous tensor parallelism is refused without tensor parallelism.
    text = planned(*words, *of_run, "--parallelism.tensor_parallel_degree=2", tokens=2**18, count=40)
    meshes = [tomllib.loads(block.partition("\n")[2])["parallelism"] for block in text.split("\n# ")[1:]]
    assert {mesh["context_parallel_rotate_method"] for mesh in meshes} == {"alltoall"}
    assert {mesh["fsdp_prefetch_blocks"] for mesh in meshes} == {2}
    assert {mesh["fsdp_blocks_per_group"] for mesh in meshes} == {2}
    is_async = {mesh.get("tensor_parallel_degree", 1) > 1: mesh.get("enable_async_tensor_parallel") for mesh in meshes}
    assert is_async == {True: True, False: False}


def test_replica_groups_share_the_sequences_of_a_step(tmp_path):
    groups = ["--fault_tolerance.enable=true", "--fault_tolerance.group_size=2"]
    with pytest.raises(ConfigError, match=r"1,536 tokens a step: 2 replica groups do not divide its sequences; change"):
        planned(*groups, gpus=2, tokens=3 * 512)
    block = planned(*groups, gpus=2, tokens=8 * 512, count=1).split("\n# ")[1]
    file = tmp_path / "mesh.toml"
    file.write_text(block.partition("\n")[2].replace("[training]", "[training]\nseq_len = 512"))
    argv = [f"--job.config_file={file}", *groups]
    assert preflight.resolve(load_config(argv), world_size=2, device_type="cuda").global_batch_size == 8


def test_a_rule_that_refuses_all_meshes_is_the_error():
    with pytest.raises(ConfigError, match=r"data.stages, first_step 3: a recovering replica group"):
        planned(
            "--fault_tolerance.enable=true", "--fault_tolerance.group_size=1",
            "--data.stages=[{first_step = 3, seq_len = 256}]", tokens=8 * 512,
        )  # fmt: skip


def test_later_stages_and_frozen_layers_are_checked_on_each_mesh():
    assert "seq_len" not in planned("--data.stages=[{first_step = 3, seq_len = 1024}]")
    text = planned("--training.freeze_schedule=[{step = 3, layers = 2, pipeline_parallel_degree = 2}]")
    meshes = [tomllib.loads(block.partition("\n")[2])["parallelism"] for block in text.split("\n# ")[1:]]
    assert all(mesh["pipeline_parallel_degree"] >= 2 for mesh in meshes)


def test_a_model_that_fits_on_no_mesh_is_an_error():
    h100 = read_hardware("h100")
    assert SearchGoal(gpus=4, hardware=h100, tokens_per_step=1, run_tokens=1).usable_gib == pytest.approx(0.9 * 79.1)
    with pytest.raises(ConfigError, match=r"GiB more than the 0\.9 GiB that are usable"):
        describe_plans(
            [DEBUG, "--model.flavor=8B", "--model.args.n_layers=4"], gpus=4, tokens=2**14, count=1,
            hardware=replace(h100, memory_gib=1.0),
        )  # fmt: skip


def searched(*, gpus, rows):
    options = ["--model.flavor=30B-A3B", "--model.args.n_layers=4", "--training.seq_len=4096"]
    config = load_config(["--model.name=qwen3_moe", "--training.local_batch_size=1", *options])
    plan = preflight.resolve(config, world_size=1, device_type="cuda")
    goal = SearchGoal(gpus=gpus, hardware=read_hardware("h200"), tokens_per_step=rows * 4096, run_tokens=10**12)
    return search(plan, goal=goal, count=60)


def test_experts_are_placed_on_several_ranks():
    best = searched(gpus=8, rows=8).best
    assert any(each.plan.degrees.ep > 1 for each in best)
    assert all(each.time.parts["ep"] > 0 for each in best if each.plan.degrees.ep > 1)


@pytest.mark.slow
def test_16384_devices_are_searched_too():
    best = searched(gpus=16384, rows=16384).best
    assert len(best) == 60
    assert all(each.plan.world_size == 16384 for each in best)


def test_what_is_wrong_is_one_clear_line(python):
    with pytest.raises(ConfigError, match=r"1,000 tokens a step: must be a multiple of training.seq_len 512"):
        planned(tokens=1000)
    with pytest.raises(ConfigError, match=r"no mesh of 7 devices divides the model and 3 sequences a step"):
        planned(gpus=7, tokens=3 * 512)
    with pytest.raises(
        ConfigError, match=r"no mesh of 8 x NVIDIA H100 .* comes closest, and needs [\d,.]+ GiB, mostly st"
    ):
        planned("--model.flavor=405B", "--model.args.n_layers=20", "--training.seq_len=8192")
    command = [python, ROOT / "scripts" / "plan.py", DEBUG[19:], "--gpus=8", "--hardware=h99"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith('error: hardware "h99": unknown; name one of a100, b200')
    assert len(done.stderr.splitlines()) == 1


def test_more_gpus_than_any_run_may_have_are_an_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        plan.main(["train_configs/debug_model.toml", "--gpus=999999999999"])
    assert "--gpus=999999999999: at most 131,072 are planned for" in capsys.readouterr().err
