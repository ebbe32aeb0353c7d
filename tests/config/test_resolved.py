"""Options that follow from others: degrees, global batch size and the run's folder."""

from torchtitan_clone.config import (
    Config,
    Degrees,
    load_config,
    resolved_degrees,
    resolved_global_batch_size,
    run_folder,
)
from torchtitan_clone.config.schema import FaultTolerance


def test_degrees_and_global_batch_size() -> None:
    config = load_config(["--parallelism.data_parallel_replicate_degree=2"])
    degrees = resolved_degrees(config.parallelism, 8)
    assert degrees == Degrees(pp=1, dp_replicate=2, dp_shard=4, cp=1, tp=1)
    assert degrees.data == 8
    disabled = FaultTolerance()
    three_groups = FaultTolerance(enable=True, group_size=3)
    assert resolved_global_batch_size(config.training, degrees, disabled) == 64
    assert resolved_global_batch_size(config.training, degrees, three_groups) == 192
    given = load_config(["--training.global_batch_size=16"]).training
    assert resolved_global_batch_size(given, degrees, three_groups) == 16


def test_run_folder() -> None:
    assert str(run_folder(Config().job)) == "outputs/run"
    assert str(run_folder(load_config(["--job.run_name=a", "--job.dump_folder=/x"]).job)) == "/x/a"
    assert str(run_folder(load_config(["--job.run_name=a"]).job)) == "outputs/a"
