"""What a machine is measured to reach becomes a table that the planner reads, and whose prediction follows it."""

import torch

from torchtitan_clone.config import load_config
from torchtitan_clone.planner.hardware import Fitted, Hardware, read_hardware
from torchtitan_clone.planner.measure import best_seconds, to_toml
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
    is_shared=True,
    fitted=Fitted(products=1.0, link=1.0),
)


def test_a_table_is_read_as_it_was_written(tmp_path):
    (tmp_path / "mine.toml").write_text(to_toml(TABLE))
    assert read_hardware(str(tmp_path / "mine.toml")) == TABLE
    assert 0 < best_seconds(lambda: torch.ones(10).sum(), device=torch.device("cpu"), repeats=2) < 10


def test_ranks_share_a_processor_and_hide_no_communication():
    options = ["--training.seq_len=256", "--training.mixed_precision_param=float32"]
    alone, two = (
        predict_step_time(preflight.resolve(load_config(options), world_size=ranks, device_type="cpu"), hardware=TABLE)
        for ranks in (1, 2)
    )
    # Each rank has as many rows as the one, and half of the processor.
    assert two.parts["products"] == 2 * alone.parts["products"]
    assert two.parts["fsdp"] > 0
    assert "fsdp" not in alone.parts
    assert alone.mfu == 0.0
