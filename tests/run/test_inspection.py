"""The rows that are shown are those that a run trains on, also with scripts/inspect_data.py."""

import json
import random

import numpy as np
import pytest

from tests.programs import load_program
from torchtitan_clone.config import ConfigError
from torchtitan_clone.run import preflight
from torchtitan_clone.run.inspection import inspect_run
from torchtitan_clone.run.loaders import open_loaders
from torchtitan_clone.testing.runs import make_short_documents, options, rows, train


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Returns a folder with short documents."""
    return make_short_documents(tmp_path_factory.mktemp("text") / "corpus")


@pytest.fixture(scope="module")
def script():
    """Returns scripts/inspect_data.py as a module."""
    return load_program("scripts/inspect_data.py")


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """Returns the folder of a run whose batch size only its metrics tell, with every second step logged."""
    folder = tmp_path_factory.mktemp("run")
    changes = {"training__global_batch_size": None, "training__steps": 6, "metrics__log_freq": 2}
    code, output = train(
        options(corpus, folder, data__packing="best_fit", **changes), world_size=2, log_folder=folder / "log"
    )
    assert code == 0, output
    return folder / "run"


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_any_row_of_any_step_is_the_one_that_is_trained(corpus, tmp_path, packing):
    words = options(corpus, tmp_path, data__packing=packing)
    inspected = inspect_run(None, words=words)
    plan = preflight.resolve(inspected.config, world_size=1, device_type="cpu")
    loader, _ = open_loaders(plan, dataset=inspected.dataset, rank=0)
    seen = [next(loader).tokens_BT.numpy() for _ in range(300)]
    generator = random.Random(0)
    for _ in range(100):
        step, row = generator.randint(1, 300), generator.randrange(8)
        assert np.array_equal(inspected.rows_of_step(step)[row, :-1], seen[step - 1][row])


def test_the_batch_size_is_read_from_the_metrics(corpus, run):
    inspected = inspect_run(run, words=[])
    assert [row["step"] for row in rows(run.parent) if "tokens_seen" in row] == [1, 2, 4, 6]
    known = inspect_run(run, words=["--training.global_batch_size=8"])
    for step in (1, 2, 3, 6, 9):
        assert inspected.samples_of_step(step) == range(8 * step - 8, 8 * step)
        assert np.array_equal(inspected.rows_of_step(step), known.rows_of_step(step))
    # A run that went on with twice as many ranks, and a line that a killed process left behind.
    metrics = run / "metrics.jsonl"
    before = metrics.read_text()
    metrics.write_text(before + json.dumps({"step": 8, "tokens_seen": 64 * (48 + 32)}) + '\n{"step": 10, "tok')
    assert inspect_run(run, words=[]).samples_of_step(8) == range(64, 80)
    metrics.write_text(before + json.dumps({"step": 8, "tokens_seen": 64 * 57 + 1}) + "\n")
    with pytest.raises(ConfigError, match=r"give the size as --training\.global_batch_size"):
        inspect_run(run, words=[]).samples_of_step(8)
    metrics.write_text(before)


def test_the_script_shows_documents_and_their_lengths(run, corpus, script, capsys):
    assert script.main(["rows", f"--folder={run}", "--step=3", "--row=5"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("step 3, row 5\n--- document of ")
    texts = [json.loads(line)["text"] for line in (corpus / "documents.jsonl").read_text().splitlines()]
    documents = [each.partition("\n")[2].rstrip("\n") for each in shown.split("--- document of ")[1:]]
    assert all(any(document.partition("\n---")[0] in text for text in texts) for document in documents)
    assert sum(document in texts for document in documents) >= len(documents) - 1
    assert script.main(["documents", f"--folder={run}"]) == 0
    shown = capsys.readouterr().out.splitlines()
    store = inspect_run(run, words=[]).dataset.store
    assert shown[1].split()[:3] == ["train", f"{store.meta.documents['train']:,}", f"{store.meta.tokens['train']:,}"]
    assert "are longer than a row of 65 tokens" in shown[2]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["rows", "--step=0"], "steps are counted from 1"),
        (["rows", "--row=9"], "rows 0 to 7"),
        (["rows", "--training.dataset=org/name"], "streamed data"),
        (["rows", "--training.datset=x"], "training.dataset"),
    ],
)
def test_what_cannot_be_shown_is_one_error(run, script, capsys, words, complaint):
    folder = [] if "--training.dataset=org/name" in words else [f"--folder={run}"]
    assert script.main([*words, *folder]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert complaint in error


def test_a_folder_that_is_no_run_is_one_error(script, tmp_path, capsys):
    assert script.main(["rows", f"--folder={tmp_path}"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
