"""Leftovers of exports that were killed are restored or deleted at the next start."""

import shutil

from tests.support.runs import options, train


def test_leftovers_of_killed_exports_are_restored_or_deleted(corpus, tmp_path):
    def run(steps):
        argv = options(corpus, tmp_path, training__steps=steps, checkpoint__hf_export_interval=2)
        code, output = train(argv, log_folder=tmp_path)
        assert code == 0, output
        return sorted(path.name for path in exports.iterdir())

    exports = tmp_path / "run" / "hf"
    assert run(2) == ["step-2"]
    (exports / "step-2" / "config.json").unlink()  # tells it from an export that is made again
    (exports / "step-2").rename(exports / "step-2.replaced")  # killed between the two renames
    shutil.copytree(exports / "step-2.replaced", exports / "step-2.partial")
    assert run(3) == ["step-2"]
    assert not (exports / "step-2" / "config.json").exists()


def test_a_run_that_is_rewound_to_its_last_step_exports_it(corpus, tmp_path):
    """The run has been trained further before, and has recorded that it was complete then."""
    for steps, changes in ((4, {}), (2, {"checkpoint__load_step": 2, "checkpoint__last_save_in_hf": True})):
        argv = options(corpus, tmp_path, training__steps=steps, checkpoint__interval=2, **changes)
        code, text = train(argv, log_folder=tmp_path)
        assert code == 0, text
    assert [path.name for path in (tmp_path / "run" / "hf").iterdir()] == ["step-2"]
