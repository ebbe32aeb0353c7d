"""Saves of a run: what a full disk leaves, and which checkpoints are kept."""

import resource

from tests.support.harness import run_ranks
from tests.support.runs import losses, options, train, train_rank
from torchtitan_clone.checkpoint.folder import committed_steps, finished_step


def limited_file_size(argv, logs, limit):
    """Trains as a rank whose files cannot grow past the limit, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return train_rank(argv, logs)


def test_a_full_disk_leaves_the_previous_checkpoint_complete(corpus, tmp_path):
    assert train(options(corpus, tmp_path, training__steps=2), log_folder=tmp_path)[0] == 0
    logs = [tmp_path / "rank0.log"]
    longer = options(corpus, tmp_path, training__steps=6, checkpoint__interval=1)
    assert run_ranks(limited_file_size, 1, longer, logs, 50_000) == [1]
    output = logs[0].read_text()
    assert "step 3 could not be saved" in output
    assert "File too large" in output
    assert max(losses(tmp_path)) == 6
    assert [p.name for p in (tmp_path / "run" / "checkpoint").glob("step*")] == ["step-2"]
    code, output = train(longer, log_folder=tmp_path)
    assert code == 0
    assert "resumed after step 2" in output


def test_old_checkpoints_are_deleted(corpus, tmp_path):
    argv = options(corpus, tmp_path, training__steps=7, checkpoint__interval=2, checkpoint__keep_latest_k=2)
    assert train(argv, log_folder=tmp_path)[0] == 0
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoint").glob("step*")) == ["step-6", "step-7"]


def test_a_run_whose_weights_cannot_be_exported_is_not_complete(corpus, tmp_path):
    argv = options(corpus, tmp_path, training__steps=2, checkpoint__last_save_model_only=True)
    folder = tmp_path / "run" / "checkpoint"
    folder.mkdir(parents=True)
    (folder / "model_only").write_text("in the way")
    code, output = train(argv, world_size=2, log_folder=tmp_path)
    assert (code, "its weights could not be exported" in output) == (1, True), output
    assert (committed_steps(folder), finished_step(folder)) == ([2], 0)
    (folder / "model_only").unlink()
    assert train(argv, world_size=2, log_folder=tmp_path)[0] == 0
    assert (committed_steps(folder / "model_only"), finished_step(folder)) == ([2], 2)
