"""What a machine is measured to reach becomes a table that the planner reads, and whose prediction follows it.

Runs scripts/measure_hardware.py, too.
"""

from dataclasses import asdict, replace

import pytest
import torch

from tests.programs import load_program
from torchtitan_clone.config import load_config
from torchtitan_clone.planner.hardware import Cpu, Fitted, Hardware, read_hardware
from torchtitan_clone.planner.measure import RUNS, best_seconds, fit_rounds, step_plans, to_toml
from torchtitan_clone.planner.time_model import predict_step_time
from torchtitan_clone.run import preflight

TABLE = Hardware(
    name="two processors",
    device_type="cpu",
    memory_gib=8.0,
    products=[[64.0, 0.05], [256.0, 0.1]],
    memory_gbps=10.0,
    node_size=64,
    link_gbps=2.0,
    cpu=Cpu(cores=2),
    fitted=Fitted(products=1.0, link=1.0),
)
LAYERS = 6


def with_cpu(**values):
    return replace(TABLE, cpu=replace(TABLE.cpu, **values))


def parts(ranks, hardware, **degrees):
    """Returns the parts of a step of 8 rows of 256 tokens on each data-parallel rank."""
    options = [
        "--training.seq_len=256",
        "--training.mixed_precision_param=float32",
        "--activation_checkpoint.mode=none",
    ]
    options += [f"--parallelism.{name}_parallel_degree={degree}" for name, degree in degrees.items()]
    plan = preflight.resolve(load_config(options), world_size=ranks, device_type="cpu")
    assert (plan.model_args.n_layers, plan.model_args.n_heads) == (LAYERS, 8)
    return predict_step_time(plan, hardware=hardware).parts


def test_a_table_is_read_as_it_was_written(tmp_path):
    (tmp_path / "mine.toml").write_text(to_toml(TABLE))
    assert read_hardware(str(tmp_path / "mine.toml")) == TABLE
    assert 0 < best_seconds(lambda: torch.ones(10).sum(), device=torch.device("cpu"), repeats=2) < 10


def test_a_missing_folder_of_the_table_is_an_error_before_measuring(tmp_path, capsys):
    file = tmp_path / "missing" / "mine.toml"
    assert load_program("scripts/measure_hardware.py").main([str(file), "--rounds=0"]) == 2
    assert capsys.readouterr() == ("", f"error: {file}: there is no folder {file.parent}; create it first\n")


def test_a_machine_is_measured_at_least_once(tmp_path, capsys):
    assert load_program("scripts/measure_hardware.py").main([str(tmp_path / "mine.toml"), "--rounds=0"]) == 2
    assert capsys.readouterr() == ("", "error: --rounds=0 must be at least 1 and --ranks=2 at least 0\n")
    assert load_program("scripts/measure_hardware.py").main([str(tmp_path), "--ranks=0"]) == 2
    assert capsys.readouterr() == ("", f"error: {tmp_path}: is a folder; name a file\n")


def test_ranks_share_a_processor_and_hide_no_communication():
    crowded = with_cpu(contention=1.25)
    alone, two = (parts(ranks, crowded) for ranks in (1, 2))
    # Each rank has as many rows as the one, and half of the processor.
    for name in ("products", "attention", "elementwise"):
        assert two[name] == pytest.approx(2 * 1.25 * alone[name])
    assert alone["products"] == parts(1, TABLE)["products"]
    assert two["fsdp"] > 0
    assert "fsdp" not in alone


def test_time_of_layers_counts_layers_axes_and_ranks_on_a_core():
    assert "dispatch" not in parts(1, TABLE)
    table = with_cpu(layer_us=10.0, shard_us=1.0, tensor_us=100.0, context_us=1000.0)
    us = 1e-6 * (LAYERS + 1)
    assert parts(1, table)["dispatch"] == pytest.approx(10 * us)
    assert parts(2, table)["dispatch"] == pytest.approx(11 * us)
    assert parts(2, table, tensor=2)["dispatch"] == pytest.approx(110 * us)
    assert parts(2, table, context=2)["dispatch"] == pytest.approx(1011 * us)
    assert parts(8, table, tensor=2)["dispatch"] == pytest.approx(4 * 111 * us)
    updated, known = (parts(4, each, pipeline=2)["optimizer"] for each in (with_cpu(update_us=10.0), TABLE))
    assert updated - known == pytest.approx(2 * 10e-6 * (LAYERS / 2 + 1))


def test_attention_takes_time_for_each_score():
    seconds = [parts(1, with_cpu(score_ns=score_ns))["attention"] for score_ns in (0.0, 2.0)]
    scores = LAYERS * 8 * 8 * 256 * 256 / 2
    assert seconds[1] - seconds[0] == pytest.approx(2e-9 * 3.5 * scores)


def test_tensor_parallelism_copies_what_it_communicates():
    seconds = [parts(2, with_cpu(tensor_passes=passes), tensor=2)["tp"] for passes in (0.0, 3.0)]
    collectives = LAYERS * 8 + 2  # a gather and a reduction around both sublayers, and a gather before the output
    copied = 3 * collectives * 8 * 256 * 256 * 4
    assert seconds[1] - seconds[0] == pytest.approx(2 * copied / (1e9 * TABLE.memory_gbps))


def test_stages_of_a_pipeline_compute_faster_or_slower():
    fast, known = (parts(2, table, pipeline=2) for table in (with_cpu(pipeline=0.5), TABLE))
    for name in ("products", "attention", "elementwise", "bubble"):
        assert fast[name] == pytest.approx(known[name] / 2, rel=0.01)
    assert parts(2, with_cpu(pipeline=0.5)) == parts(2, TABLE)


def test_a_table_is_fitted_to_measured_steps():
    wanted = with_cpu(
        update_us=1e3,
        layer_us=4e3,
        shard_us=2e3,
        tensor_us=9e3,
        context_us=3e3,
        contention=1.1,
        tensor_passes=8.0,
        pipeline=0.8,
        score_ns=1.0,
    )
    wanted = replace(wanted, fitted=replace(TABLE.fitted, eager_passes=20.0, context=1.5))
    steps = {
        name: sum(predict_step_time(plan, hardware=wanted).seconds for plan in step_plans(mesh, sizes))
        for name, mesh, sizes in RUNS
    }
    slower = {name: 2 * seconds for name, seconds in steps.items()}
    faster = {name: seconds / 2 for name, seconds in steps.items()}
    fast_links = replace(TABLE, link_gbps=9 * TABLE.link_gbps)
    found = fit_rounds([(TABLE, [slower]), (fast_links, [faster]), (TABLE, [steps])])
    assert found.link_gbps == pytest.approx(TABLE.link_gbps, rel=1e-3)
    assert asdict(found.cpu) == pytest.approx(asdict(wanted.cpu), rel=0.05)
    assert asdict(found.fitted) == pytest.approx(asdict(wanted.fitted), rel=0.05)
    alone = {name: steps[name] for name in ("layer_us", "update_us", "eager_passes")}
    assert fit_rounds([(TABLE, [alone])]).cpu.tensor_us == 0.0
