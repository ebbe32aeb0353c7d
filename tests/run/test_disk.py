"""What checkpoints take of a disk is what is written, and too little of it is said once, at the start."""

import re
import signal
from pathlib import Path

import pytest

from tests.support.runs import Ranks, options, wait_for_step
from torchtitan_clone.config import load_config
from torchtitan_clone.config.schema import Checkpoint
from torchtitan_clone.run.disk import checkpoint_bytes, describe_disk, find_disk_notices, kept_checkpoints
from torchtitan_clone.run.preflight import resolve

FIRST_RUN = Path(__file__).parents[2] / "docs" / "first_run.md"


def plan_of(argv: list[str], *, ranks: int = 1):
    return resolve(load_config(argv), world_size=ranks, device_type="cuda" if ranks > 1 else "cpu")


@pytest.mark.parametrize(
    ("changes", "steps", "count"),
    [
        ({}, 1000, 2),
        ({}, 1001, 3),
        ({}, 100_000, 11),
        ({"keep_latest_k": 0}, 100_000, 200),
        ({"keep_latest_k": 2, "keep_every": 10_000}, 100_000, 13),
        ({"keep_latest_k": 2, "interval": 400}, 500, 2),
        ({"folder": "s3://bucket/run", "local_interval": 100}, 100_000, 3),
        ({"folder": "s3://bucket/run", "local_keep_latest_k": 0}, 100_000, 200),
    ],
)
def test_checkpoints_that_are_kept_at_once(changes: dict[str, object], steps: int, count: int) -> None:
    assert kept_checkpoints(Checkpoint(**changes), steps=steps) == count


def test_a_start_says_once_that_the_disk_is_too_small(corpus: Path, tmp_path: Path) -> None:
    much = {"checkpoint__keep_latest_k": 10**6, "checkpoint__interval": 2, "training__steps": 10**8}
    argv = options(corpus, tmp_path, **much, ema__enable=True)
    ranks = Ranks(argv, world_size=2, log_folder=tmp_path / "logs")
    wait_for_step(tmp_path, 3)
    ranks.signal(signal.SIGTERM)
    code, output = ranks.wait()
    assert code == 0, output
    (said,) = re.findall(r"WARNING \[rank 0\] (checkpoint\.keep_latest_k = 1000000: .*)", output)
    assert re.search(r"a checkpoint takes .* MiB, and up to 1,000,001 of them .* GiB, but .* GiB free; lower it", said)
    step = max((tmp_path / "run" / "checkpoint").glob("step-*"), key=lambda path: path.stat().st_mtime)
    written = sum(path.stat().st_size for path in step.iterdir())
    predicted = checkpoint_bytes(plan_of(argv, ranks=2))
    assert predicted <= written <= 1.05 * predicted + 64 * 1024
    assert list(find_disk_notices(plan_of([*argv, "--checkpoint.keep_latest_k=2"], ranks=2))) == []
    assert list(find_disk_notices(plan_of([*argv, "--checkpoint.enable=false"], ranks=2))) == []


def test_a_dry_run_states_the_size_of_an_8b_model(corpus: Path, tmp_path: Path) -> None:
    model = {f"model__args__{key}": None for key in ("dim", "n_layers", "n_heads", "n_kv_heads", "multiple_of")}
    argv = options(corpus, tmp_path, **model, model__flavor="8B", training__steps=100_000)
    argv += ["--training.seq_len=8192", "--training.local_batch_size=1", "--model.args.vocab_size=128256"]
    plan = plan_of(argv, ranks=8)
    assert checkpoint_bytes(plan) == 12 * plan.parameter_count
    assert describe_disk(plan) == "89.75 GiB each, at most 11 at once: 987.20 GiB"
    assert describe_disk(plan) in FIRST_RUN.read_text()
