"""Errors that end a run before any process group starts, and before any folder is made."""

import pytest

from torchtitan_clone.testing.runs import options, train


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"training__seq_length": 3}, "seq_len"),
        ({"training__steps": "abc"}, "training.steps"),
        ({"training__global_batch_size": 7}, "global_batch_size"),
        ({"training__seq_len": 100_000}, "seq_len"),
        ({"training__dataset_path": "nowhere"}, "nowhere"),
        ({"model__hf_assets_path": "nowhere"}, "nowhere"),
        ({"model__flavor": "9B"}, "known: debugmodel"),
        ({"model__args__vocab_size": 100}, "vocab"),
        ({"optimizer__name": "SGD"}, "known: AdamW"),
        ({"parallelism__data_parallel_shard_degree": 3}, "WORLD_SIZE"),
        ({"lr_scheduler__decay_type": "step"}, "known: linear"),
    ],
)
def test_an_unusable_option_is_one_error_and_makes_no_folder(corpus, tmp_path, changes, fragment):
    runs = tmp_path / "runs"
    code, output = train(options(corpus, runs, **changes), log_folder=tmp_path)
    assert code == 2
    assert fragment in output
    assert "Traceback" not in output
    assert len(output.splitlines()) < 20
    assert not runs.exists()


def test_an_unwritable_folder_is_an_error(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    code, output = train(options(corpus, tmp_path / "file" / "runs"), log_folder=tmp_path)
    assert (code, "Traceback" in output) == (2, False)
    assert "job.dump_folder: nothing can be written to" in output


def test_a_folder_with_checkpoints_of_another_run_is_an_error(corpus, tmp_path):
    assert train(options(corpus, tmp_path, training__steps=2), log_folder=tmp_path)[0] == 0
    code, output = train(options(corpus, tmp_path, model__args__n_layers=3), log_folder=tmp_path)
    assert code == 2
    assert "model.args.n_layers 2 -> 3" in output
    code, output = train(options(corpus, tmp_path, training__seq_len=32), log_folder=tmp_path)
    assert code == 2
    assert "seq_len" in output
    changed = options(corpus, tmp_path, training__seq_len=32, training__steps=4, checkpoint__allow_data_change=True)
    assert train(changed, log_folder=tmp_path)[0] == 0


def test_two_ranks_report_an_error_once(corpus, tmp_path):
    argv = options(corpus, tmp_path / "runs", training__steps=0)
    code, output = train(argv, world_size=2, log_folder=tmp_path)
    assert code == 2
    assert output.count("training.steps") == 1
