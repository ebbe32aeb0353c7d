"""Steps far above those before them are skipped, alike on all ranks and after a resume; clean runs have none."""

import json

from tests.support import runs
from torchtitan_clone.checkpoint.progress import Progress, parse_progress
from torchtitan_clone.config.schema import Training
from torchtitan_clone.documents import Value
from torchtitan_clone.run.spikes import SpikeWindow

OPTIONS = Training(on_spike="skip", spike_window=8, spike_sigma=4.0, spike_patience=3)


def seen(losses, *, norms=None, window=None):
    """Returns the window after these losses, and which of them were spikes."""
    window, spikes = window or SpikeWindow(), []
    for step, (loss, norm) in enumerate(zip(losses, norms or [1.0] * len(losses), strict=True), 1):
        spike = window.find_spike(loss=loss, grad_norm=norm, options=OPTIONS)
        window = window.after(step, loss=loss, grad_norm=norm, is_spike=spike is not None, options=OPTIONS)
        spikes.append(spike)
    return window, spikes


def test_a_value_far_above_the_window_is_a_spike_and_stays_out_of_it():
    window, spikes = seen([3.0, 3.1, 2.9, 3.0, 9.0, 3.0, 2.9])
    assert [index for index, spike in enumerate(spikes) if spike] == [4]
    assert spikes[4] == "loss 9, mean 3 and standard deviation 0.082 of 4 steps"
    assert window.losses == (3.0, 3.1, 2.9, 3.0, 3.0, 2.9)
    assert seen([3.0] * 4 + [1.0] + [3.0])[1] == [None] * 6  # below the mean
    norms = [1.0, 1.1, 0.9, 1.0, 7.0, 1.0]
    assert [index for index, spike in enumerate(seen([3.0] * 6, norms=norms)[1]) if spike] == [4]
    assert seen([3.0] * 4 + [3.001])[1] == [None] * 5  # constant values
    assert seen([3.0, 9.0, 3.0])[1] == [None] * 3  # before the window is half full


def test_the_window_keeps_the_last_values_and_a_new_level_is_accepted():
    assert seen([float(value) for value in range(20, 0, -1)])[0].losses == tuple(float(v) for v in range(8, 0, -1))
    window, spikes = seen([3.0, 3.1, 2.9, 3.0, 9.0, 9.1, 9.2, 9.0])
    assert [index for index, spike in enumerate(spikes) if spike] == [4, 5, 6]
    assert (window.losses, window.in_a_row) == ((9.2, 9.0), 0)
    assert seen([3.0, 3.0], window=SpikeWindow(losses=(9.2,), grad_norms=(1.0,), stage=1))[0].stage == 1
    assert window.in_stage(0) is window
    assert window.in_stage(2) == SpikeWindow(stage=2)


def test_a_window_is_part_of_the_progress():
    window, _ = seen([3.0, 3.1, 0.1 + 0.2, 3.0, 9.0])
    assert (window.in_a_row, window.first_step) == (1, 5)
    progress = Progress(step=5, tokens_seen=1, skipped_steps=1, data={}, spikes=window.to_json())
    text = json.dumps(progress.to_json())
    assert SpikeWindow.from_json(parse_progress(Value(json.loads(text), where="")).spikes) == window
    assert "spikes" not in Progress(step=5, tokens_seen=1, skipped_steps=1, data={}).to_json()


SPIKY = {
    "training__steps": 24, "training__spike_window": 16, "training__spike_sigma": 6.0, "checkpoint__interval": 8,
    "lr_scheduler__warmup_steps": 0, "lr_scheduler__min_lr_factor": 1.0, "optimizer__lr": 1e-5,
    # A rate times a million in step 14: the next steps are far above those before.
    "lr_scheduler__points": "[[0, 1.0], [13, 1.0], [14, 1e6], [15, 1.0]]",
}  # fmt: skip


def test_spikes_are_skipped_alike_on_any_mesh_and_after_a_resume(corpus, tmp_path):
    def run(name, world_size=1, **changes):
        options = runs.options(corpus, tmp_path / name, **SPIKY | changes)
        code, output = runs.train(options, world_size=world_size, log_folder=tmp_path)
        assert code == 0, output
        rows = [row for row in runs.rows(tmp_path / name) if "loss" in row]
        return {row["step"]: row["skipped_steps"] for row in rows}, output

    assert set(run("none")[0].values()) == {0}
    skipped, output = run("skip", training__on_spike="skip")
    assert "step 15 is a spike: " in output
    assert skipped[14] == 0 < skipped[15]
    mesh = {"parallelism__data_parallel_shard_degree": 2, "training__on_spike": "skip"}
    assert run("mesh", 2, **mesh)[0] == skipped
    run("resumed", training__on_spike="skip", training__steps=16, lr_scheduler__total_steps=24)
    assert run("resumed", 2, **mesh, lr_scheduler__total_steps=24)[0] == skipped
