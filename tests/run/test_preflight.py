"""Errors that end a run before any process group starts and before any folder is made, of a start and of a dry run."""

import shutil
import sys

import pytest

from tests.marks import needs_door
from tests.support.harness import run_ranks
from tests.support.parity_matrix import GPT_OSS, MOE
from tests.support.runs import exit_codes, losses, make_corpus, options, train


def start_and_dry_run(argv, log, missing):
    """Returns exit code and output of a start and of a dry run, in a process without the packages `missing`."""
    sys.modules |= dict.fromkeys(missing)
    return exit_codes([argv, [*argv, "--dry-run"]], log)


def refusal(argv, folder, *, missing=()):
    """Returns the message that refuses a start; asserts that a dry run prints the same."""
    (results,) = run_ranks(start_and_dry_run, 1, argv, folder / "log", missing)
    outputs = [output for _, output in results]
    assert [code for code, _ in results] == [2, 2], outputs
    assert [output.count("error: ") for output in outputs] == [1, 1], outputs
    start, dry_run = (output[output.index("error: ") :] for output in outputs)
    assert start == dry_run
    assert "Traceback" not in start
    assert len(start.splitlines()) < 20
    return start


PIPELINE = {"parallelism__pipeline_parallel_degree": 2}
FRAGMENTS = {
    "fault_tolerance__enable": True, "fault_tolerance__group_size": 1, "fault_tolerance__semi_sync_method": "diloco",
    "fault_tolerance__sync_steps": 10,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"training__seq_length": 3}, ["training.seq_length", "training.seq_len"]),
        ({"training__steps": "abc"}, ["training.steps", "abc"]),
        ({"training__global_batch_size": 7}, ["training.global_batch_size = 7", "set training.global_batch_size to"]),
        ({"training__seq_len": 100_000}, ["training.seq_len = 100000", "set it to at most"]),
        ({"training__dataset_path": "nowhere"}, ["nowhere"]),
        ({"training__dataset": "unknown"}, ["unknown"]),
        ({"model__name": "llama9"}, ['model.name = "llama9"', "known: llama3"]),
        ({"model__flavor": "9B"}, ['model.flavor = "9B"', "known: debugmodel"]),
        ({"model__hf_assets_path": "nowhere"}, ["nowhere"]),
        ({"model__args__vocab_size": 100}, ["model.args.vocab_size = 100", "tokens"]),
        ({"optimizer__name": "SGD"}, ["SGD", "known: AdamW"]),
        ({"optimizer__groups": "[{pattern='layer.*', lr=1.0}]"}, ["optimizer.groups", "layer.*"]),
        ({"compile__enable": True, "compile__backend": "gcc"}, ['compile.backend = "gcc"', "known: ", "inductor"]),
        ({"lr_scheduler__decay_type": "step"}, ["lr_scheduler.decay_type", "step", "known: linear"]),
        ({"parallelism__data_parallel_shard_degree": 3}, ["WORLD_SIZE 1", "launch 3 ranks"]),
        ({**PIPELINE, "parallelism__pipeline_parallel_schedule": "1f1b"}, ['schedule = "1f1b": no such schedule']),
        ({**PIPELINE, "parallelism__pipeline_parallel_schedule_csv": "nowhere.csv"}, ["cannot be read as a schedule"]),
        ({"checkpoint__initial_load_path": "nowhere"}, ["checkpoint.initial_load_path", "nowhere"]),
        pytest.param(
            {"fault_tolerance__enable": True, "fault_tolerance__group_size": 2},
            ["$TORCHFT_LIGHTHOUSE is not set"],
            marks=needs_door("torchft"),
        ),
        pytest.param(
            {**FRAGMENTS, "fault_tolerance__num_fragments": 10},
            ["num_fragments = 10: the model has only 5 modules"],
            marks=needs_door("torchft"),
        ),
        pytest.param(
            {**FRAGMENTS, "fault_tolerance__module_fqns_per_model_fragment": "[['norm'], ['output']]"},
            ["module_fqns_per_model_fragment: every module", "check layers.0, layers.1, tok_embeddings"],
            marks=needs_door("torchft"),
        ),
        (
            {**MOE, "model__args__moe__expert_bias": True, "checkpoint__hf_export_interval": 5},
            ["model.args.moe.expert_bias = true: qwen3_moe has false in the Hugging Face format; set it to that"],
        ),
        (
            {**GPT_OSS, "model__args__moe__score_scale": 2.0, "checkpoint__last_save_in_hf": True},
            ["model.args.moe.score_scale = 2.0: gpt_oss has 1.0 in the Hugging Face format"],
        ),
    ],
)
def test_an_unusable_option_is_one_error_and_makes_no_folder(corpus, tmp_path, changes, fragments):
    runs = tmp_path / "runs"
    if "training__dataset" in changes:
        changes = {"training__dataset_path": None, **changes}
    message = refusal(options(corpus, runs, **changes), tmp_path)
    assert all(fragment in message for fragment in fragments), message
    assert not runs.exists()


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiling_needs_a_compiler(corpus, tmp_path, backend):
    runs = tmp_path / "runs"
    argv = options(corpus, runs, training__steps=1, compile__enable=True, compile__backend=backend)
    code, output = train(argv, log_folder=tmp_path, env={"CXX": "no-such-compiler"})
    if backend == "aot_eager":
        assert code == 0, output
        return
    assert code == 2
    assert not runs.exists()
    assert "Traceback" not in output
    assert "error: compile.enable = true: " in output
    assert "no-such-compiler is not on $PATH; install g++" in output


def test_a_missing_package_is_an_error_with_its_install_command(corpus, tmp_path):
    argv = options(corpus, tmp_path / "runs", metrics__enable_wandb=True)
    message = refusal(argv, tmp_path, missing=("wandb",))
    assert "metrics.enable_wandb = true" in message
    assert 'pip install "wandb>=0.31"' in message


def test_an_unwritable_folder_is_an_error(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    message = refusal(options(corpus, tmp_path / "file" / "runs"), tmp_path)
    assert "job.dump_folder" in message
    assert "choose another folder" in message


def test_a_folder_with_checkpoints_of_another_run_is_an_error(corpus, tmp_path):
    assert train(options(corpus, tmp_path, training__steps=2), log_folder=tmp_path)[0] == 0
    message = refusal(options(corpus, tmp_path, model__args__n_layers=3), tmp_path)
    assert "model.args.n_layers 2 -> 3" in message
    assert "choose another job.run_name" in message
    assert "training.seq_len 64 -> 32" in refusal(options(corpus, tmp_path, training__seq_len=32), tmp_path)
    parsed = options(corpus, tmp_path, training__parse_special_tokens=True)
    assert "training.parse_special_tokens False -> True" in refusal(parsed, tmp_path)
    seed = options(corpus, tmp_path, checkpoint__create_seed_checkpoint=True)
    assert "checkpoint.create_seed_checkpoint = true" in refusal(seed, tmp_path)
    code, output = train(options(make_corpus(tmp_path / "other", files=9), tmp_path), log_folder=tmp_path)
    assert code == 2
    assert "error: the checkpoint was trained on different batches: the fingerprint of the data was" in output
    changed = options(corpus, tmp_path, training__seq_len=32, training__steps=4, checkpoint__allow_data_change=True)
    assert train(changed, log_folder=tmp_path)[0] == 0


def test_a_run_resumes_on_the_same_text_at_another_path(corpus, tmp_path):
    text = tmp_path / "other_node" / "text"
    shutil.copytree(corpus, text)
    assert train(options(corpus, tmp_path, training__steps=2), log_folder=tmp_path)[0] == 0
    code, output = train(options(text, tmp_path, training__steps=4), log_folder=tmp_path)
    assert code == 0, output
    assert "resumed after step 2" in output


def test_two_ranks_report_an_error_once(corpus, tmp_path):
    argv = options(corpus, tmp_path / "runs", training__steps=0)
    code, output = train(argv, world_size=2, log_folder=tmp_path)
    assert code == 2
    assert output.count("training.steps") == 1


def test_a_state_of_the_last_step_leaves_nothing_to_train(corpus, tmp_path):
    assert train(options(corpus, tmp_path, training__steps=4), log_folder=tmp_path)[0] == 0
    first = tmp_path / "run" / "checkpoint"
    changes = {"checkpoint__initial_load_path": first, "checkpoint__initial_load_model_only": False}
    for steps in (3, 4):
        message = refusal(options(corpus, tmp_path / "runs", training__steps=steps, **changes), tmp_path)
        assert f"{first / 'step-4'}: it is of step 4, and this run ends after step {steps}" in message
    assert not (tmp_path / "runs").exists()
    argv = options(corpus, tmp_path / "runs", training__steps=6, **changes)
    for step in (6, 8):  # the second start resumes from the run's own checkpoint
        argv = [*argv, f"--training.steps={step}"]
        assert train(argv, log_folder=tmp_path)[0] == 0
    assert sorted(losses(tmp_path / "runs")) == [5, 6, 7, 8]
