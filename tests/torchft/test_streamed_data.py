"""Tests of quorum.py and connection.py with a mixture: every stream resumes at its position in any group."""

import pytest

from tests.data.corpora import jsonl, texts, write
from tests.support.cluster import Cluster, committed_once
from tests.support.faults import Fault
from tests.support.runs import losses, options, train
from torchtitan_clone.checkpoint.folder import expected_progress
from torchtitan_clone.config.messages import toml_like
from torchtitan_clone.config.schema import Checkpoint

pytest.importorskip("datasets")

ROWS, STEPS, ROUND = 12, 40, 5


@pytest.fixture(scope="module")
def changes(corpus, tmp_path_factory):
    """Returns options of a run on a mixture of local text and a stream of three files, for several epochs."""
    rows = texts(180)
    files: dict[str, bytes | str] = {
        f"org/name/{number}.jsonl": jsonl(rows[number * 60 : (number + 1) * 60]) for number in range(3)
    }
    stream = write(tmp_path_factory.mktemp("hub"), files) / "org" / "name"
    sources = [{"name": "web", "path": str(corpus)}, {"name": "stream", "dataset": str(stream), "weight": 3.0}]
    stages = [{"first_step": 9, "weights": {"stream": 1.0}}, {"first_step": 27, "weights": {"web": 0.3, "stream": 0.7}}]
    return {
        "data__sources": toml_like(sources),
        "data__stages": toml_like(stages),
        "training__dataset_path": None,
        "training__global_batch_size": ROWS,
        "training__steps": STEPS,
        "checkpoint__interval": 20,
        "model__args__n_layers": 1,
    }


@pytest.fixture(scope="module")
def single(corpus, tmp_path_factory, changes):
    """Returns the folder of one uninterrupted run without replica groups."""
    folder = tmp_path_factory.mktemp("single")
    assert train(options(corpus, folder, **changes), log_folder=folder)[0] == 0
    return folder


def cursors(folder):
    """Returns the final positions of all streams."""
    progress = expected_progress(Checkpoint(), folder=folder / "run" / "checkpoint", identity="")
    assert progress is not None
    assert progress.step == STEPS
    return progress.data["cursors"]


def test_streams_resume_at_their_position_after_kills(corpus, tmp_path, changes, single):
    faults = [
        Fault(kind="kill", place="all_reduce", step=8, group=1),
        Fault(kind="nan", place="gradients", step=10, group=0),
        Fault(kind="kill", place="committed", step=31, group=0),
    ]
    with Cluster(corpus, tmp_path, groups=2, **changes) as cluster:
        cluster.start_all(faults=faults).watch_over(until=lambda: cluster.step_of(0) > 22)
        cluster.kill(0, 1)
        cluster.faults = faults[2:]
        cluster.start_all(faults=faults[2:]).watch_over()
        assert "resumed after step 20" in cluster.log
        assert [group for _, group, _ in cluster.deaths] == [1, 0]
        assert cluster.log.count("healed from another replica group") >= 2
        assert {rank: len(found) for rank, found in cluster.digests().items()} == {0: 1}
        assert committed_once(cluster.records(), steps=STEPS, rows=ROWS) == []
        expected = losses(single)
        assert len(cluster.losses) == STEPS
        for step, loss in cluster.losses.items():
            assert loss == pytest.approx(expected[step], rel=1e-3), f"step {step}"
        assert cursors(tmp_path) == cursors(single)


def test_streams_resume_at_their_position_after_a_rolled_back_round(corpus, tmp_path, changes, single):
    semi_sync = {"fault_tolerance__semi_sync_method": "local_sgd", "fault_tolerance__sync_steps": ROUND}
    with Cluster(corpus, tmp_path, groups=2, **changes, **semi_sync) as cluster:
        cluster.start_all(faults=[Fault(kind="kill", place="all_reduce", step=3, group=1)]).watch_over()
        assert "the step is repeated" in cluster.log_of(0)
        assert [group for _, group, _ in cluster.deaths] == [1]
        assert committed_once(cluster.records(), steps=STEPS // ROUND, rows=ROWS * ROUND) == []
        assert {rank: len(found) for rank, found in cluster.digests("model/").items()} == {0: 1}
        assert cursors(tmp_path) == cursors(single)
