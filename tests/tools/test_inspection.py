"""The rows that are shown are those that a run trains on, also with scripts/inspect_data.py."""

import json
import os
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.data.chats import template, write_tokenizer
from tests.data.corpora import jsonl, write
from tests.support.harness import run_ranks
from tests.support.runs import make_short_documents, options, rows, train
from tests.support.trainers import open_trainers
from torchtitan_clone.commands import inspect_data
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import toml_like
from torchtitan_clone.run import preflight
from torchtitan_clone.run.loaders import open_loaders
from torchtitan_clone.tools.inspection import inspect_run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Returns a folder with short documents."""
    return make_short_documents(tmp_path_factory.mktemp("text") / "corpus")


@pytest.fixture(scope="module")
def script():
    """Returns the command."""
    return inspect_data


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
        (source, tokens) = inspected.rows_of_step(step)[row]
        assert (source, tokens[:-1].tolist()) == ("", seen[step - 1][row].tolist())


def test_the_batch_size_is_read_from_the_metrics(corpus, run):
    inspected = inspect_run(run, words=[])
    assert [row["step"] for row in rows(run.parent) if "tokens_seen" in row] == [1, 2, 4, 6]
    known = inspect_run(run, words=["--training.global_batch_size=8"])
    for step in (1, 2, 3, 6, 9):
        assert inspected.samples_of_step(step) == range(8 * step - 8, 8 * step)
        found, expected = ([tokens for _, tokens in each.rows_of_step(step)] for each in (inspected, known))
        assert np.array_equal(found, expected)


def test_the_metrics_tell_batch_sizes_that_a_resume_has_changed(run, tmp_path):
    """Also where the options name the size: they are those of the last start."""
    folder = shutil.copytree(run, tmp_path / "run")
    before = (folder / "metrics.jsonl").read_text()

    def samples(row, step, *words):
        (folder / "metrics.jsonl").write_text(before + json.dumps(row) + '\n{"step": 12, "tok')  # after a kill
        return inspect_run(folder, words=list(words)).samples_of_step(step)

    resumed = {"step": 8, "tokens_seen": 64 * (48 + 8 + 16)}  # after a checkpoint at step 7
    for words in ([], ["--training.global_batch_size=16"]):
        expected = [range(8), range(40, 48), range(48, 56), range(56, 72), range(72, 88), range(104, 120)]
        assert [samples(resumed, step, *words) for step in (1, 6, 7, 8, 9, 11)] == expected
    assert samples(resumed, 10, "--training.global_batch_size=4") == range(76, 80)
    for changed in (64 * 57 + 1, 64 * 56):
        with pytest.raises(ConfigError, match=r"training\.seq_len = 64: not that of step 8; restore it"):
            samples({"step": 8, "tokens_seen": changed}, 7)
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"give the size as --training\.global_batch_size"):
        inspect_run(folder, words=[]).samples_of_step(1)


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


def test_the_file_of_the_environment_is_read_without_a_folder(run, tmp_path, script, capsys, monkeypatch):
    shutil.copy(run / "config.toml", tmp_path / "my.toml")
    monkeypatch.setenv("CONFIG_FILE", str(tmp_path / "my.toml"))
    assert script.main(["documents"]) == 0
    shown = capsys.readouterr().out
    (tmp_path / "my.toml").write_text("[training]\nseq_len = 3")
    assert script.main(["documents", f"--folder={run}"]) == 0
    assert capsys.readouterr().out == shown


SOURCES = ("web", "sums", "lines")
STAGES = [
    {"first_step": 13, "weights": {"web": 0.2, "lines": 0.8}},
    {"first_step": 23, "seq_len": 128, "local_batch_size": 2, "weights": {"web": 1.0, "sums": 1.0, "lines": 1.0}},
]
SHAPES = [(8, 64)] * 22 + [(4, 128)] * 20
"""Sequences and their tokens, of each global batch."""


def record_batches(argvs, dump):
    """Trains runs one after another, and saves the tokens that enter the embedding of this rank, as they come."""
    found = []

    def record(module, inputs):
        if isinstance(module, nn.Embedding):
            found.append(inputs[0].numpy().copy())

    with register_module_forward_pre_hook(record):
        for trainer in open_trainers(argvs):
            assert trainer.train()
    tokens = np.concatenate([batch.ravel() for batch in found])
    np.save(f"{dump}{os.environ['RANK']}.npy", tokens)


@pytest.fixture(scope="module")
def mixture_run(corpus, tmp_path_factory):
    """Returns the folder of a run of two ranks on a mixture in three stages, and the tokens of each of its steps.

    The run is stopped after step 10, and continues with ranges of batches that it passes over, one of them trained.
    """
    folder = tmp_path_factory.mktemp("mixture")
    sums = [f"{n} and {n + 1} make {2 * n + 1}" for n in range(400)]
    lines = [json.loads(line)["text"] for line in (corpus / "documents.jsonl").read_text().splitlines()]
    write(folder, {"sums/a.jsonl": jsonl(sums * 2), "lines/a.jsonl": jsonl([*sums, *lines, *lines[::3]])})
    write(folder, {"lines/b.py": Path(json.__file__).read_text()})
    paths = {"web": corpus, "sums": folder / "sums", "lines": folder / "lines"}
    sources = [{"name": name, "path": str(path), "weight": 0.5} for name, path in paths.items()]
    changes = {
        "training__dataset_path": None,
        "training__global_batch_size": None,  # only the metrics tell it
        "data__sources": toml_like(sources),
        "data__stages": toml_like(STAGES),
        "data__packing": "best_fit",
        "data__drop_duplicates": True,
        "model__args__max_seq_len": 128,
        "model__args__n_layers": 1,
        "metrics__log_freq": 4,
    }
    argv = options(corpus, folder, training__steps=10, **changes)
    skipping = options(corpus, folder, training__steps=32, data__skip_steps="[[4, 5], [14, 16], [21, 24]]", **changes)
    run_ranks(record_batches, 2, [argv, skipping], folder / "dump")
    batches = [*range(1, 14), 17, 18, 19, 20, *range(25, 40)]
    dumps = [np.load(folder / f"dump{rank}.npy") for rank in range(2)]
    seen = []
    for batch in batches:
        size, seq_len = SHAPES[batch - 1]
        parts = [dump[: size * seq_len // 2].reshape(-1, seq_len) for dump in dumps]
        dumps = [dump[size * seq_len // 2 :] for dump in dumps]
        seen.append(np.concatenate(parts))
    assert [dump.size for dump in dumps] == [0, 0]
    return folder / "run", seen


def test_any_row_of_a_mixture_is_the_one_that_was_trained(mixture_run):
    folder, seen = mixture_run
    inspected = inspect_run(folder, words=[])
    assert [each.step for each in inspected.logged] == [0, 1, 4, 8, 10, 11, 12, 16, 20, 24, 28, 32]
    generator = random.Random(0)
    steps = [1, 4, 5, 10, 11, 13, 14, 17, 18, 32, *(generator.randint(1, 32) for _ in range(100))]
    for step in steps:
        row = generator.randrange(len(seen[step - 1]))
        source, tokens = inspected.rows_of_step(step)[row]
        assert source in SOURCES
        assert tokens[:-1].tolist() == seen[step - 1][row].tolist()
    # As if the ranges were not known, which a rule may have added: only logged steps can be told.
    unknown = inspect_run(folder, words=["--data.skip_steps=[]"])
    assert np.array_equal(unknown.rows_of_step(16)[3][1][:-1], seen[15][3])
    with pytest.raises(ConfigError, match="passed over between the logged steps 12 and 16 that"):
        unknown.rows_of_step(14)


def test_the_script_shows_the_plan_of_a_mixture(mixture_run, script, capsys):
    folder, _ = mixture_run
    assert script.main(["plan", f"--folder={folder}"]) == 0
    shown = capsys.readouterr().out.splitlines()
    tables = {title: [row.split() for row in shown[shown.index(title) + 2 :][:3]] for title in shown if title[0] != " "}
    titles = [
        "stage 1, from step 1: 12 batches of 8 sequences of 64 tokens",
        "stage 2, from step 13: 10 batches of 8 sequences of 64 tokens",
        "stage 3, from step 23: 17 batches of 4 sequences of 128 tokens",
        "all 32 steps",
    ]
    assert list(tables) == titles
    assert [row[:2] for row in tables[titles[1]]] == [["web", "20.00%"], ["sums", "0.00%"], ["lines", "80.00%"]]
    assert tables[titles[1]][1][2:] == ["0", "0.000"]
    # The last row of the metrics counts the same: the tokens that were trained, and the epochs of the order.
    last = [row for row in rows(folder.parent) if "tokens_seen" in row][-1]
    for name, _, tokens, epochs in tables[titles[3]]:
        assert abs(last[f"epochs/{name}"] - float(epochs)) <= 5e-4
        assert abs(sum(float(table[SOURCES.index(name)][3]) for table in tables.values()) - 2 * float(epochs)) <= 2e-3
        assert int(tokens.replace(",", "")) > 0
    assert script.main(["documents", f"--folder={folder}"]) == 0
    shown = capsys.readouterr().out
    dropped = [int(line.split()[0].replace(",", "")) for line in shown.splitlines() if "dropped as duplicates" in line]
    assert dropped[1] == 400
    assert dropped[2] > 400
    assert script.main(["rows", f"--folder={folder}", "--step=30", "--row=2"]) == 0
    assert re.match(r"step 30, row 2, source (web|sums|lines)\n--- document of ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["rows", "--step=0"], "steps are counted from 1"),
        (["rows", f"--step={'9' * 20}"], "steps are counted from 1"),
        (["rows", "--row=9"], "rows 0 to 7"),
        (["rows", "--training.dataset=org/name"], "streamed data"),
        (["rows", "--training.datset=x"], "training.dataset"),
        (["plan"], "no data.sources, data.stages or data.skip_steps"),
        (["plan", "--data.skip_steps=[[5, 2]]"], "must be a range [first, last]"),
        (["rows", "--training.seq_len=0"], "training.seq_len = 0: must be"),
        (["documents", "--training.seq_len=-3"], "training.seq_len = -3: must be"),
        (["plan", '--data.sources=[{name = "a", path = "x", weight = -1.0}]'], "weight = -1.0 must be"),
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


def test_the_targets_of_chats_are_shown(tmp_path, script, capsys):
    chat = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2\n日本"}]
    data = write(tmp_path / "data", {"a.jsonl": json.dumps({"messages": chat}).encode() + b"\n"})
    assets = write_tokenizer(tmp_path / "t", chat_template=template("chatml", is_marked=False), eos_token="<|im_end|>")
    words = [f"--training.dataset_path={data}", "--training.format=chat", f"--model.hf_assets_path={assets}"]
    words += [f"--data.cache_folder={tmp_path / 'cache'}", "--data.packing=best_fit", "--training.seq_len=64"]
    assert script.main(["rows", "--step=1", *words, "--training.global_batch_size=1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert re.fullmatch("--- chat of [0-9]+ tokens, of which [0-9]+ are targets", shown[1])
    assert shown[2:5] == [
        r'context "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"',
        r'target  "2\n日本<|im_end|>"',
        r'context "\n"',
    ]
    assert re.fullmatch("--- [0-9]+ tokens of padding", shown[5])
    assert len(shown) == 6
