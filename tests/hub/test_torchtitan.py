"""Checkpoints of torchtitan are converted and resume: hub/torchtitan.py, and scripts/convert_from_dcp.py."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.checkpoint_states import read_tensors
from tests.support.harness import run_ranks
from tests.support.plain_data import PlainData
from tests.support.plain_loop import lr_factor
from tests.support.runs import GLOBAL_BATCH_SIZE, losses, options
from tests.support.torchtitan_twin import OPTIMIZER, QWEN3_SIZES, TwinRun, train_and_save
from tests.support.trainers import train_all
from torchtitan_clone.checkpoint.progress import NOTHING_DONE
from torchtitan_clone.commands import convert_from_dcp
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.hub.torchtitan import open_torchtitan
from torchtitan_clone.models import find_model
from torchtitan_clone.parallel.runtime import Launch
from torchtitan_clone.run import preflight

SAVED, STEPS = 4, 15
ALIKE = {
    "training__document_masking": False, "optimizer__decay_all_parameters": True, "optimizer__lr": OPTIMIZER["lr"],
    "training__steps": STEPS, "training__local_batch_size": GLOBAL_BATCH_SIZE,
}  # fmt: skip
"""Options with which a run computes what torchtitan does."""


def argv_of(corpus: Path, folder: Path, **changes: object) -> list[str]:
    return options(corpus, folder, **ALIKE, **changes)


def twin_run(corpus: Path, folder: Path) -> TwinRun:
    """Returns a run on the first batches of ours, and after it is saved on the same from the first one on."""
    config = load_config(argv_of(corpus, folder))
    plan = preflight.resolve(config, world_size=1, device_type="cpu")
    dataset = preflight.prepare(plan, launch=Launch.from_environment()).dataset
    data = PlainData(dataset, seq_len=64, rows=GLOBAL_BATCH_SIZE, seed=0, document_masking=False)
    found = [next(data) for _ in range(STEPS - SAVED)]
    batches = [(batch.tokens_BT.tolist(), batch.targets_BT.tolist()) for batch in found]
    factors = [lr_factor(step, options=config.lr_scheduler, steps=STEPS) for step in range(1, STEPS + 2)]
    return TwinRun(folder=str(folder), batches=batches[:SAVED] + batches, factors=factors, saved_after=SAVED)


def convert(run: TwinRun, *words: str) -> Path:
    """Returns the folder of the converted checkpoints."""
    folder = Path(run.folder) / "converted"
    source = Path(run.folder) / "checkpoint" / f"step-{run.saved_after}"
    assert convert_from_dcp.main([str(source), str(folder), *words]) == 0
    return folder


@pytest.fixture(scope="module")
def saved(corpus, tmp_path_factory) -> dict[int, tuple[TwinRun, list[float]]]:
    """Returns runs that one rank and two have saved, and their losses."""
    folder = tmp_path_factory.mktemp("torchtitan")
    runs = {ranks: twin_run(corpus, folder / str(ranks)) for ranks in (1, 2)}
    return {ranks: (run, run_ranks(train_and_save, ranks, run)[0]) for ranks, run in runs.items()}


def resume(corpus: Path, tmp_path: Path, runs: dict[int, TwinRun], **changes: object) -> dict[int, list[float]]:
    """Converts checkpoints and resumes from them; returns the losses of the steps since."""
    argvs = {ranks: argv_of(corpus, tmp_path / str(ranks), checkpoint__enable=False, **changes) for ranks in runs}
    full = "--checkpoint.initial_load_model_only=false"
    starts = [
        [*argv, f"--checkpoint.initial_load_path={convert(runs[ranks], *argv)}", full] for ranks, argv in argvs.items()
    ]
    run_ranks(train_all, 1, starts)
    found = {ranks: losses(tmp_path / str(ranks)) for ranks in runs}
    assert all([*steps] == [*range(SAVED + 1, STEPS + 1)] for steps in found.values())
    return {ranks: [*steps.values()] for ranks, steps in found.items()}


def assert_equal_losses(found: list[float], expected: list[float]) -> None:
    """Checks the first loss, which is that of the weights, and ten that depend on the optimizer's state."""
    differences = [abs(ours - theirs) / theirs for ours, theirs in zip(found, expected, strict=True)]
    assert differences[0] < 1e-6
    assert len(differences) > 10
    assert max(differences) < 1e-5, differences


def test_a_run_resumes_with_the_losses_that_the_other_one_has(corpus, tmp_path, saved):
    found = resume(corpus, tmp_path, {ranks: run for ranks, (run, _) in saved.items()})
    for ranks, (_, expected) in saved.items():
        assert_equal_losses(found[ranks], expected[SAVED:])
    progress = json.loads((convert(saved[2][0], *argv_of(corpus, tmp_path)) / "step-4" / "progress.json").read_text())
    assert progress == {"step": 4, "tokens_seen": 4 * 8 * 64, "skipped_steps": 0, "data": {}}


def test_settings_that_differ_are_warned_of(corpus, tmp_path, saved):
    run, _ = saved[1]
    config = load_config(argv_of(corpus, tmp_path, optimizer__beta2=0.99, optimizer__eps=1e-9))
    found = open_torchtitan(Path(run.folder) / "checkpoint" / "step-4", config=config)
    assert found.warnings == (
        "optimizer.beta2 = 0.99, and the run that saved the checkpoint had 0.95",
        "optimizer.eps = 1e-09, and the run that saved the checkpoint had 1e-08",
    )
    config = load_config(argv_of(corpus, tmp_path))
    assert open_torchtitan(Path(run.folder) / "checkpoint" / "step-4", config=config).warnings == ()


def test_weights_alone_are_converted_to_the_dtype_of_the_run(corpus, tmp_path, saved):
    run, _ = saved[2]
    complete = read_tensors(convert(run, *argv_of(corpus, tmp_path)) / "step-4")
    argv = argv_of(corpus, tmp_path, training__dtype="bfloat16")
    alone = replace(run, folder=str(tmp_path))
    os.symlink(Path(run.folder) / "checkpoint", tmp_path / "checkpoint")
    weights = read_tensors(convert(alone, "--model_only", *argv) / "step-0")
    assert weights.keys() == {name for name in complete if name.startswith("model/")}
    for name, weight in weights.items():
        assert torch.equal(weight, complete[name].bfloat16()), name


REFUSED = {
    "another family": ({"model__name": "qwen2"}, "read for llama3, qwen3; export the weights with its last_save_in_hf"),
    "another number of layers": ({"model__args__n_layers": 3}, r"missing in the checkpoint: layers\.2\."),
    "fewer layers": ({"model__args__n_layers": 1}, r"only in the checkpoint: .*layers\.1\."),
    "another width": ({"model__args__dim": 32}, r"different shape: tok_embeddings.weight \[2048, 64\] -> \[2048, 32\]"),
    "another optimizer": (
        {"optimizer__name": "Muon"},
        "missing in the checkpoint: .*momentum.* only in the checkpoint: ",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_run_of_other_tensors_is_refused(corpus, tmp_path, saved, kind):
    changes, what = REFUSED[kind]
    config = load_config(argv_of(corpus, tmp_path, **changes))
    with pytest.raises(ConfigError, match=what):
        open_torchtitan(Path(saved[1][0].folder) / "checkpoint" / "step-4", config=config)


def test_a_file_of_nanogpt_is_for_another_script(corpus, tmp_path):
    torch.save({"model": {}, "iter_num": 3}, tmp_path / "ckpt.pt")
    with pytest.raises(ConfigError, match=r"ckpt.pt is a file; give .* scripts/convert_from_nanogpt.py"):
        open_torchtitan(tmp_path / "ckpt.pt", config=load_config(argv_of(corpus, tmp_path)))


QWEN3 = {f"model__args__{name}": size for name, size in QWEN3_SIZES.items()} | {
    "model__name": "qwen3", "model__args__multiple_of": None, "model__args__tied_embeddings": True,
}  # fmt: skip


def test_weights_of_qwen3_keep_their_order_and_tied_ones_come_once(corpus, tmp_path):
    config = load_config(argv_of(corpus, tmp_path, **QWEN3))
    spec = find_model(config.model)
    meta = spec.state_on_meta(spec.resolve_args(config.model))
    state = {name: torch.randn(weight.shape) for name, weight in meta.items()}
    embedding = state["tok_embeddings.weight"]
    for step, output in ((1, embedding), (2, -embedding)):
        dcp.save({**state, "output.weight": output}, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    found = open_torchtitan(tmp_path / "step-1", config=config)
    assert found.progress == NOTHING_DONE
    assert found.meta.keys() == {f"model/{name}" for name in state}
    assert all(torch.equal(found.read(f"model/{name}"), weight) for name, weight in state.items())
    with pytest.raises(ConfigError, match=r"step-2: output.weight differs from the embedding, .* set it to false"):
        open_torchtitan(tmp_path / "step-2", config=config)


@pytest.mark.parametrize("is_qwen3", [False, True], ids=["llama3", "qwen3"])
def test_a_checkpoint_of_torchtitans_own_saver_resumes(corpus, tmp_path, is_qwen3):
    if not (checkout := os.environ.get("TORCHTITAN_CHECKOUT")):
        pytest.skip("TORCHTITAN_CHECKOUT is not set to a checkout of torchtitan v0.2.2")
    changes = {"checkout": checkout, "is_qwen3": is_qwen3}
    runs = {ranks: replace(twin_run(corpus, tmp_path / f"{ranks}"), **changes) for ranks in (1, 2)}
    expected = {ranks: run_ranks(train_and_save, ranks, run)[0] for ranks, run in runs.items()}
    # torchtitan stretches long wavelengths in every size of Llama 3.
    alike = QWEN3 if is_qwen3 else {"model__args__rope_scaling": "{factor = 8.0}"}
    found = resume(corpus, tmp_path, runs, **alike)
    for ranks in runs:
        assert_equal_losses(found[ranks], expected[ranks][SAVED:])
