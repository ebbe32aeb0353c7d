"""After spikes that skipping does not end a run goes back to a checkpoint, and continues behind their batches.

Tests of run/rewind.py and of what it asks of checkpoint/manager.py, run/state.py, data/mixture.py and config/stages.py.
"""

import json
import os
import signal
from functools import partial

import pytest
import torch

from tests.support.checkpoint_states import SlowState
from tests.support.faults import ReplicaGroupWrapper
from tests.support.harness import RankFailed, run_ranks
from tests.support.runs import losses, options, rows, train
from tests.support.trainers import open_trainer, open_trainers, train_all
from torchtitan_clone.checkpoint.folder import committed_steps
from torchtitan_clone.checkpoint.progress import Progress, Rewind, parse_progress
from torchtitan_clone.config import load_config
from torchtitan_clone.documents import Value
from torchtitan_clone.observe.records import SAVED
from torchtitan_clone.tools.report_charts import all_charts
from torchtitan_clone.tools.report_data import read_run
from torchtitan_clone.trainer import Trainer

SPIKY = {
    "training__on_spike": "rewind", "training__spike_window": 16, "training__spike_patience": 3,
    "training__steps": 24, "checkpoint__interval": 4, "checkpoint__keep_latest_k": 2,
    "lr_scheduler__warmup_steps": 0, "lr_scheduler__min_lr_factor": 1.0, "optimizer__lr": 1e-5,
}  # fmt: skip
SPOILT, TARGET, LAST = 14, 12, 17
"""The weights are spoilt in step 14, after its loss: steps 15 to 17 are spikes, and the run goes back to step 12."""


class SpoilsWeights(ReplicaGroupWrapper):
    """Multiplies all weights in one attempt at a step, as no step does, and may kill the process in a later one."""

    def __init__(self, group, *, killed_in=None):
        super().__init__(group)
        self._attempts = 0
        self._killed_in = killed_in

    def sum_gradients(self, parameters):
        self._attempts += 1
        if self._attempts == self._killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._attempts == SPOILT:
            with torch.no_grad():
                for parameter in parameters:
                    parameter.mul_(5)


def train_spoilt(runs, killed_in=None):
    for trainer in open_trainers(runs, wrap_replica_group=partial(SpoilsWeights, killed_in=killed_in)):
        assert trainer.train()


def argv(corpus, folder, **changes):
    return options(corpus, folder, **SPIKY | changes)


def files_of(folder, step, *, suffix=""):
    """Returns the digests of the tensors and random states of a step, and its progress."""
    path = folder / "run" / "checkpoint" / f"step-{step}{suffix}"
    manifest = json.loads((path / "manifest.json").read_text())["manifest"]
    digests = {name: record["digest"] for name, record in manifest["files"].items() if name.startswith("rank-")}
    return digests, json.loads((path / "progress.json").read_text())


@pytest.fixture(scope="module")
def rewound(corpus, tmp_path_factory):
    """Returns the folder of a run that went back once."""
    folder = tmp_path_factory.mktemp("rewound")
    run_ranks(train_spoilt, 1, [argv(corpus, folder)])
    return folder


def test_a_run_goes_back_and_says_what_it_passed_over(rewound):
    steps = [row for row in rows(rewound) if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 25))
    assert [row["batch"] for row in steps] == [*range(1, 13), *range(18, 30)]
    assert {row["skipped_steps"] for row in steps} == {0}
    assert steps[-1]["tokens/data"] == steps[-1]["tokens_seen"] == 24 * 8 * 64
    (event,) = [row for row in rows(rewound) if row.get("event") == "rewound after spikes"]
    expected = {"step": TARGET, "from_step": LAST, "first_batch": 13, "last_batch": 17}
    assert {key: event[key] for key in expected} == expected
    titles = {chart.title: chart for chart in all_charts([read_run(rewound / "run", name="")], points=100)}
    marks = {trace["name"]: trace for trace in titles["Starts, deaths, saves and recoveries"].traces}
    assert marks["rewind"]["y"] == [TARGET]
    assert [row["steps_thrown_away"] for row in rows(rewound) if row.get("event") == "goodput"][-1] == 5
    assert files_of(rewound, 24)[1]["rewinds"] == [expected]
    assert (rewound / "run" / "checkpoint" / "step-16.left-for-spikes").is_dir()
    assert committed_steps(rewound / "run" / "checkpoint") == [20, 24]
    for config in (rewound / "run" / "config.toml", rewound / "run" / "checkpoint" / "step-24" / "config.toml"):
        assert load_config([f"--job.config_file={config}"]).data.skip_steps == [[13, 17]]


def test_the_run_is_that_with_its_batches_passed_over(corpus, rewound, tmp_path):
    """Also where the process is killed after the run went back, and before it saved again."""
    skipped = argv(corpus, tmp_path / "skipped", data__skip_steps="[[13, 17]]")
    before = argv(corpus, tmp_path / "resumed", training__steps=18, lr_scheduler__total_steps=24)
    after = argv(corpus, tmp_path / "resumed", lr_scheduler__total_steps=24)
    run_ranks(train_spoilt, 1, [before])
    run_ranks(train_all, 1, [skipped, after])
    for folder in (tmp_path / "skipped", tmp_path / "resumed"):
        assert losses(folder) == losses(rewound)
        assert files_of(folder, 24)[0] == files_of(rewound, 24)[0]
    assert files_of(tmp_path / "resumed", 24)[1]["rewinds"] == files_of(rewound, 24)[1]["rewinds"]
    resumed = load_config([f"--job.config_file={tmp_path / 'resumed' / 'run' / 'config.toml'}"])
    assert resumed.data.skip_steps == [[13, 17]]


class SlowlySavedTrainer(Trainer):
    """A trainer of which the save of the last step before the run goes back takes longer than a step."""

    def state_tensors(self):
        return SlowState(super().state_tensors(), seconds=0.5 * (self._state.step == LAST - 1))


def train_spoilt_with_a_slow_save(options):
    with open_trainer(options, wrap_replica_group=SpoilsWeights, trainer=SlowlySavedTrainer) as trainer:
        assert trainer.train()


def test_a_save_in_progress_is_completed_before_a_run_goes_back(corpus, rewound, tmp_path):
    run_ranks(train_spoilt_with_a_slow_save, 1, argv(corpus, tmp_path, checkpoint__async_mode="async"))
    assert losses(tmp_path) == losses(rewound)
    assert committed_steps(tmp_path / "run" / "checkpoint") == [20, 24]
    for step, suffix in ((16, ".left-for-spikes"), (20, ""), (24, "")):
        assert files_of(tmp_path, step, suffix=suffix) == files_of(rewound, step, suffix=suffix)
    found, expected = (
        [row["step"] for row in rows(folder) if row.get("event") == SAVED] for folder in (tmp_path, rewound)
    )
    assert found == expected


def test_a_kill_before_the_next_save_resumes_where_the_run_went_back_to(corpus, tmp_path):
    with pytest.raises(RankFailed, match="exit code -9"):
        run_ranks(train_spoilt, 1, [argv(corpus, tmp_path / "killed")], LAST + 2)
    assert committed_steps(tmp_path / "killed" / "run" / "checkpoint") == [12]
    run_ranks(train_all, 1, [argv(corpus, tmp_path / name) for name in ("killed", "clean")])
    assert losses(tmp_path / "killed") == losses(tmp_path / "clean")
    assert files_of(tmp_path / "killed", 24) == files_of(tmp_path / "clean", 24)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.many_ranks)])
def test_all_ranks_of_any_mesh_go_back_alike(corpus, rewound, tmp_path, ranks):
    shard = {"parallelism__data_parallel_shard_degree": 2, "training__local_batch_size": 8 // ranks}
    freeze = {"training__freeze_schedule": "[{step = 14, layers = 1}]"}
    changes = shard | ({"parallelism__data_parallel_replicate_degree": 2} if ranks == 4 else freeze)
    run_ranks(train_spoilt, ranks, [argv(corpus, tmp_path, **changes)])
    (rewind,) = files_of(tmp_path, 24)[1]["rewinds"]
    assert rewind == {"step": TARGET, "from_step": LAST, "first_batch": 13, "last_batch": 17}
    if ranks == 4:
        assert losses(tmp_path) == pytest.approx(losses(rewound), rel=1e-5)


def test_too_many_rewinds_are_one_error(corpus, tmp_path):
    """A rate times a million in step 14 spoils the weights again on other batches."""
    points = {"lr_scheduler__points": "[[0, 1.0], [13, 1.0], [14, 1e6], [15, 1.0]]", "training__max_rewinds": 2}
    code, output = train(argv(corpus, tmp_path, **points), log_folder=tmp_path)
    assert code == 1
    assert "Traceback" not in output
    (error,) = [line for line in output.splitlines() if "ERROR" in line]
    assert "step 17 is spike number 3 in a row, loss " in error
    assert "training.max_rewinds is 2" in error


def test_spikes_without_an_older_checkpoint_are_a_new_level(corpus, tmp_path):
    run_ranks(train_spoilt, 1, [argv(corpus, tmp_path, checkpoint__interval=SPOILT)])
    progress = files_of(tmp_path, 24)[1]
    assert "rewinds" not in progress
    assert progress["skipped_steps"] == 3


def test_commits_are_counted_on_where_a_run_goes_back():
    rewinds = (
        Rewind(step=12, from_step=17, first_batch=13, last_batch=17),  # commits 13 to 17 are given up
        Rewind(step=4, from_step=20, first_batch=5, last_batch=25),  # steps 5 to 12, and commits 18 to 25
    )
    once, twice = (
        Progress(step=20, tokens_seen=0, skipped_steps=0, data={}, rewinds=rewinds[:count]) for count in (1, 2)
    )
    assert [once.step_of(commit) for commit in (12, 13, 17, 18, 25)] == [12, None, None, 13, 20]
    assert [twice.step_of(commit) for commit in (4, 5, 12, 17, 18, 25, 26)] == [4, None, None, None, None, None, 5]
    assert (once.commits, twice.commits) == (25, 41)
    assert parse_progress(Value(json.loads(json.dumps(twice.to_json())), where="")) == twice
