"""The report of a finished run: one line in the log, or an error, for each way in which a run ends."""

import logging

import pytest

from torchtitan_clone.run.state import RunOutcome, TrainingError


def outcome(**changes):
    """Returns the outcome of a run that was stopped by SIGTERM after step 7 of 10 and saved that step."""
    values = {
        "step": 7,
        "last_step": 10,
        "is_seed_checkpoint": False,
        "is_saving_enabled": True,
        "is_writer": True,
        "is_obsolete": False,
        "saved_step": 7,
        "is_exported": True,
        "stop_reason": "SIGTERM",
        "goodput": "goodput 97.0 %",
    }
    return RunOutcome(**values | changes)


@pytest.mark.parametrize(
    ("changes", "level", "fragments"),
    [
        ({}, "INFO", ["stopped by SIGTERM", "step 7 is saved", "rerun the same command to resume"]),
        ({"step": 10, "saved_step": 10}, "INFO", ["training is complete: step 10 of 10"]),
        ({"step": 0, "last_step": 0, "saved_step": 0, "is_seed_checkpoint": True}, "INFO", ["saved as step 0"]),
        (
            {"is_writer": False, "saved_step": 5},
            "INFO",
            ["stopped by SIGTERM after step 7", "another replica group", "rerun the same command to rejoin"],
        ),
        ({"is_obsolete": True, "saved_step": 5}, "INFO", ["other replica groups have completed", "after step 7"]),
        ({"is_saving_enabled": False, "saved_step": 0}, "WARNING", ["after step 7, which is not saved"]),
        ({"step": 0, "saved_step": 0}, "INFO", ["stopped by SIGTERM: no step is trained yet", "rerun"]),
        # The failed export of an earlier step was reported when it failed.
        ({"is_exported": False}, "INFO", ["step 7 is saved"]),
    ],
    ids=[
        "stopped",
        "complete",
        "seed checkpoint",
        "other group saves",
        "obsolete",
        "not saved",
        "stopped in step 1",
        "stopped without export",
    ],
)
def test_one_line_reports_how_the_run_ended(caplog, changes, level, fragments):
    with caplog.at_level(logging.INFO, logger="torchtitan_clone"):
        outcome(**changes).report()
    first = caplog.records[0]
    assert first.levelname == level
    assert all(fragment in first.getMessage() for fragment in fragments)


def test_only_a_complete_run_reports_its_goodput(caplog):
    with caplog.at_level(logging.INFO, logger="torchtitan_clone"):
        outcome().report()
        assert "goodput" not in caplog.text
        outcome(step=10, saved_step=10).report()
    assert "goodput 97.0 %" in caplog.text


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"saved_step": 5}, ["step 7 of 10", "could not be saved", "that of step 5", "Remove the cause and rerun"]),
        ({"step": 10, "saved_step": 5}, ["step 10 of 10", "could not be saved"]),
        ({"step": 10, "saved_step": 10, "is_exported": False}, ["step 10", "could not be exported"]),
    ],
    ids=["not saved", "complete but not saved", "not exported"],
)
def test_a_last_step_that_is_lost_is_an_error(caplog, changes, fragments):
    with caplog.at_level(logging.INFO, logger="torchtitan_clone"), pytest.raises(TrainingError) as error:
        outcome(**changes).report()
    assert all(fragment in str(error.value) for fragment in fragments)
    assert not caplog.records
