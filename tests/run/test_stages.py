"""Stages change the sequence length, the batch and the mixture in the middle of a run; see phases.py and plan.py."""

import json

import pytest
import torch

from tests.data.corpora import jsonl, write
from tests.support.harness import run_ranks
from tests.support.parity_matrix import PREDICTION
from tests.support.runs import losses, options, rows
from tests.support.trainers import train_all
from torchtitan_clone.commands.convert_to_hf import convert
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.config.messages import toml_like
from torchtitan_clone.parallel.runtime import Launch
from torchtitan_clone.run import preflight
from torchtitan_clone.run.describe import summary
from torchtitan_clone.run.plan import later_phases

STEPS = 12
BORDER = 7


@pytest.fixture(scope="module")
def sources(corpus, tmp_path_factory):
    """Returns data.sources for the command line: real text, and many short documents."""
    folder = write(
        tmp_path_factory.mktemp("short"), {"a.jsonl": jsonl([f"{n} and {n + 1} make {2 * n + 1}" for n in range(900)])}
    )
    return [{"name": "web", "path": str(corpus), "weight": 0.75}, {"name": "sums", "path": str(folder), "weight": 0.25}]


EXTENSION = {"first_step": BORDER, "seq_len": 256, "rope_theta": 5e6, "weights": {"web": 0.5, "sums": 0.5}}


def stage_options(corpus, folder, sources, *, steps=STEPS, stages=(EXTENSION,), **changes):
    """Returns options of a run whose sequences become four times as long at BORDER."""
    fixed = {
        "training__dataset_path": None,
        "training__steps": steps,
        "lr_scheduler__total_steps": STEPS,
        "data__sources": toml_like(sources),
        "data__stages": toml_like(list(stages)),
        "checkpoint__interval": 1000,
        "validation__enable": True,
        "validation__freq": 4,
        "validation__local_batch_size": 4,
        "data__held_out_fraction": 0.03,
    }
    return options(corpus, folder, **fixed | changes)


@pytest.fixture(scope="module")
def alone(corpus, sources, tmp_path_factory):
    """Returns the losses of a rank without a stop."""
    folder = tmp_path_factory.mktemp("alone")
    run_ranks(train_all, 1, [stage_options(corpus, folder, sources)])
    return losses(folder), rows(folder)


CONTEXT = {"parallelism__context_parallel_degree": 2}
PIPELINE = {"parallelism__pipeline_parallel_degree": 2}
RESUMED = (3, BORDER + 2, STEPS)


@pytest.mark.parametrize(
    ("world_size", "parts", "changes"),
    [(1, RESUMED, {}), (2, RESUMED[1:], CONTEXT), (2, [STEPS], PIPELINE)],
    ids=["one", "context", "pipeline"],
)
def test_an_extension_with_resumes_equals_one_run(corpus, sources, tmp_path, alone, world_size, parts, changes):
    if "parallelism__pipeline_parallel_degree" in changes:
        longer = {**EXTENSION, "global_batch_size": 2, "local_batch_size": 2}
        rows_at_once = {"training__local_batch_size": 8, "validation__local_batch_size": 8}
        changes = changes | rows_at_once | {"data__stages": toml_like([longer])}
    for steps in parts:
        run_ranks(train_all, world_size, [stage_options(corpus, tmp_path, sources, steps=steps, **changes)])
    found = losses(tmp_path)
    assert list(found) == list(range(1, STEPS + 1))
    for step, loss in alone[0].items():
        assert found[step] == pytest.approx(loss, abs=1e-4), step
    trained, expected = ([row for row in each if "loss" in row] for each in (rows(tmp_path), alone[1]))
    assert [row["tokens_seen"] for row in trained] == [512 * step for step in found]
    for row, other in zip(trained, expected, strict=True):
        assert row["tokens/web"] + row["tokens/sums"] == row["tokens_seen"]
        assert {key for key in row if "/" in key} == {key for key in other if "/" in key}
        for key in ("loss/web", "loss/sums", "bits_per_byte/web", "epochs/web", "tokens/sums"):
            assert row.get(key) == pytest.approx(other.get(key), abs=1e-4), (row["step"], key)
        by_source = [row[key] for key in ("loss/web", "loss/sums") if key in row]
        assert min(by_source) - 1e-4 <= row["loss"] <= max(by_source) + 1e-4
    validated, expected = ([row for row in each if "validation_loss" in row] for each in (rows(tmp_path), alone[1]))
    assert [row["step"] for row in expected] == [4, 8, 12]
    for row, other in zip([row for row in validated if row["step"] in (4, 8, 12)], expected, strict=True):
        for key in ("validation_loss", "validation_loss/web", "validation_loss/sums", "validation_bits_per_byte/sums"):
            assert row[key] == pytest.approx(other[key], abs=1e-4), (row["step"], key)


@pytest.mark.documentation
def test_an_extension_from_512_to_2048_tokens_equals_one_run(corpus, sources, tmp_path):
    """With a resume in each part, on one rank and on four."""
    long = toml_like([{**EXTENSION, "seq_len": 2048}])
    sizes = {"training__seq_len": 512, "model__args__max_seq_len": 2048, "data__stages": long}
    found = {}
    for name, world_size, parts, changes in (
        ("alone", 1, [STEPS], {}), ("one", 1, RESUMED, {}), ("context", 4, RESUMED, CONTEXT),
    ):  # fmt: skip
        for steps in parts:
            argv = stage_options(
                corpus, tmp_path / name, sources, steps=steps, validation__enable=False, **sizes, **changes
            )
            run_ranks(train_all, world_size, [argv])
        assert [row["tokens_seen"] for row in rows(tmp_path / name) if "loss" in row] == [
            4096 * step for step in range(1, STEPS + 1)
        ]
        found[name] = losses(tmp_path / name)
    assert found["one"] == found["alone"]
    assert found["context"] == pytest.approx(found["alone"], abs=1e-4)


def test_sources_do_not_change_the_losses_of_later_tokens(corpus, sources, tmp_path):
    """Multi-token prediction embeds the targets, which name the source in a mixture."""
    common = {"validation__enable": False, "training__global_batch_size": 4, "stages": []} | PREDICTION
    plain = {"training__dataset_path": corpus, "data__sources": None, "data__stages": None}
    runs = {"table": {}, "plain": plain}
    argvs = [stage_options(corpus, tmp_path / name, sources[:1], steps=2, **common | run) for name, run in runs.items()]
    run_ranks(train_all, 1, argvs)
    table, expected = ([row for row in rows(tmp_path / name) if "loss" in row] for name in runs)
    for row, other in zip(table, expected, strict=True):
        for key in ("loss", "auxiliary/mtp_loss_1", "auxiliary/mtp_loss_2"):
            assert row[key] == other[key]
        assert row["loss/web"] == pytest.approx(row["loss"], abs=1e-5)


def open_prepared(argv):
    """Checks a run as a start does, up to the process group."""
    config = load_config(argv)
    plan = preflight.resolve(config, world_size=1, device_type="cpu")
    return preflight.prepare(plan, launch=Launch.from_environment())


def test_stages_and_skips_are_added_to_a_run_that_began_without(corpus, sources, tmp_path):
    validation = {"validation__enable": False}
    web = {"training__dataset_path": corpus, "data__sources": None, "data__stages": None} | validation
    run_ranks(train_all, 1, [stage_options(corpus, tmp_path, sources, steps=3, **web)])
    only_web = [sources[0], sources[1] | {"weight": 0}]
    stages = [{"first_step": 5, "weights": {"sums": 1.0}}, EXTENSION]
    added = {"stages": stages, "data__skip_steps": "[[6, 8]]"} | validation
    argv = stage_options(corpus, tmp_path, only_web, steps=6, **added)
    run_ranks(train_all, 1, [argv])
    last = [row for row in rows(tmp_path) if "loss" in row][-1]
    # Step 4 is of the source before, step 5 of the other, step 6 the ninth batch, which is of the longer sequences.
    assert (last["step"], last["tokens_seen"]) == (6, 6 * 512)
    assert last["tokens/web"] + last["tokens/sums"] == 6 * 512
    assert 4 * 512 <= last["tokens/web"] <= 5 * 512
    changed = [{"first_step": 4, "weights": {"sums": 1.0}}, EXTENSION]
    for wrong, message in (
        (changed, r"the stage from step 5 has been trained: first_step was 5 and is 4"),
        ([stages[0]], r"the stage from step 7 has been trained: it is missing"),
        (
            [stages[0], {**EXTENSION, "rope_theta": 1e6}],
            "from step 7 has been trained: rope_theta was 5000000.0 and is",
        ),
        ([*stages, {"first_step": 8}], "the steps from step 8 on have been trained without its stage"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_prepared(stage_options(corpus, tmp_path, only_web, **(added | {"stages": wrong})))
    open_prepared(stage_options(corpus, tmp_path, only_web, **(added | {"stages": [*stages, {"first_step": 20}]})))


def test_a_stage_changes_the_model_and_the_shape_of_a_batch(corpus, sources, tmp_path):
    config = load_config(stage_options(corpus, tmp_path, sources))
    plan = preflight.resolve(config, world_size=2, device_type="cpu")
    assert plan.at_step(BORDER - 1) is plan
    (later,) = later_phases(plan)
    for found in (later, plan.at_step(BORDER), plan.at_step(3, batch=BORDER + 5)):
        assert found.model_args.rope_theta == 5e6
        assert (found.config.training.seq_len, found.global_batch_size) == (256, 2)
        assert (found.config.training.local_batch_size, found.config.validation.local_batch_size) == (1, 1)
        assert found.tokens_per_step == plan.tokens_per_step
    assert plan.model_args.rope_theta != 5e6
    assert f"from step {BORDER}\n" in summary(plan)


def test_a_converted_checkpoint_has_the_positions_of_its_stage(corpus, sources, tmp_path):
    run_ranks(train_all, 1, [stage_options(corpus, tmp_path, sources, checkpoint__enable=True)])
    convert(
        tmp_path / "run" / "checkpoint" / f"step-{STEPS}", tmp_path / "hf", dtype=torch.float32, hf_assets_path=None
    )
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["rope_theta"] == EXTENSION["rope_theta"]


def test_skipping_batches_that_were_trained_changes_no_positions(corpus, sources, tmp_path):
    saving = {"checkpoint__enable": True, "validation__enable": False, "training__global_batch_size": -1}
    for steps, skipped in ((4, "[]"), (5, "[[2, 4]]")):
        changes = {"steps": steps, "data__skip_steps": skipped, **saving}
        run_ranks(train_all, 2, [stage_options(corpus, tmp_path, sources, **changes)])
    source, target = tmp_path / "run" / "checkpoint" / "step-5", tmp_path / "hf"
    convert(source, target, dtype=torch.float32, hf_assets_path=None)
    assert json.loads((target / "config.json").read_text())["rope_theta"] == 500_000


def test_a_later_stage_that_cannot_be_read_is_an_error_at_the_start(corpus, sources, tmp_path):
    config = load_config(stage_options(corpus, tmp_path, sources, data__num_workers=4))
    plan = preflight.resolve(config, world_size=1, device_type="cpu")
    with pytest.raises(ConfigError, match=r"data\.num_workers = 4: more than the 2 sequences of a global batch"):
        preflight.prepare(plan, launch=Launch.from_environment())


def test_a_later_phase_that_does_not_fit_in_memory_is_an_error(corpus, tmp_path):
    large = "[{step = 5, layers = 1, local_batch_size = 1000000}]"
    changes = {"training__global_batch_size": 1000000, "model__args__n_layers": 100}
    argv = options(corpus, tmp_path, **changes, training__freeze_schedule=large)
    plan = preflight.resolve(load_config(argv), world_size=1, device_type="cpu")
    with pytest.raises(ConfigError) as error:
        preflight.prepare(plan, launch=Launch.from_environment())
    (message,) = error.value.messages
    assert message.startswith(
        "from step 5, training.local_batch_size = 1000000: the inputs of the layers need at least"
    )


BROKEN = [
    ([{"first_step": 5, "seq_len": 256, "local_batch_size": 4}], {}, "training.global_batch_size = 2: not a multiple"),
    (
        [{"first_step": 5, "seq_len": 2048, "global_batch_size": 8, "local_batch_size": 4}],
        {},
        "takes sequences of up to",
    ),
    (
        [{"first_step": 5, "rope_scaling": {"rope_type": "long"}}],
        {},
        "data.stages, with the options of its entry at step 5: model.args.rope_scaling.rope_type",
    ),
    (
        [{"first_step": 5, "rope_theta": 0.5, "rope_scaling": {"rope_type": "yarn"}}],
        {},
        "data.stages, with the options of its entry at step 5: model.args.rope_theta = 0.5",
    ),
    (
        [EXTENSION],
        {"training__freeze_schedule": "[{step = 3, layers = 1, local_batch_size = 2}]"},
        "set by data.stages",
    ),
    ([EXTENSION], {"training__steps": 10**12, "training__global_batch_size": 10**9}, "have 6.4e+22 tokens; lower them"),
    (
        [EXTENSION],
        {"fault_tolerance__enable": True, "fault_tolerance__group_size": 1},
        "let stages change weights only",
    ),
]


@pytest.mark.parametrize(("stages", "changes", "message"), BROKEN)
def test_a_stage_that_cannot_be_trained_is_an_error(corpus, sources, tmp_path, stages, changes, message):
    steps = {"steps": changes["training__steps"]} if "training__steps" in changes else {}
    changes = {key: value for key, value in changes.items() if key != "training__steps"}
    argv = stage_options(corpus, tmp_path, sources, stages=stages, model__args__max_seq_len=1024, **steps, **changes)
    with pytest.raises(ConfigError) as error:
        preflight.resolve(load_config(argv), world_size=1, device_type="cpu")
    assert message in str(error.value)
