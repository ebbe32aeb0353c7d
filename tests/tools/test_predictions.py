"""Predictions of a teacher that are stored beside tokens: who writes them, who reads them, and which are refused."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.harness import run_ranks
from tests.support.runs import make_short_documents, options, rows
from tests.support.teachers import write_predictions, write_teacher
from tests.support.trainers import train_all
from torchtitan_clone.commands import store_predictions
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.data.opening import open_dataset
from torchtitan_clone.data.predictions import IDS_FILE, VALUES_FILE
from torchtitan_clone.data.token_store import META_FILE
from torchtitan_clone.parallel.runtime import Launch
from torchtitan_clone.run import preflight

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 2048


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Returns two folders of a few documents, and a teacher."""
    folder = tmp_path_factory.mktemp("sources")
    documents = make_short_documents(folder / "all") / "documents.jsonl"
    lines = documents.read_text().splitlines()
    for name, part in (("one", lines[:60]), ("two", lines[60:100])):
        (folder / name).mkdir()
        (folder / name / "documents.jsonl").write_text("\n".join(part))
    write_teacher(folder / "teacher", folder / "one")
    return folder


def student(sources, folder, **changes):
    values = {"training__steps": 3, "data__held_out_fraction": 0.0}
    if {"distillation__store", "distillation__teacher_path"} & {*changes}:
        values["distillation__temperature"] = 2.0
    return options(sources / "one", folder, **values | changes)


def logged(folder):
    found = [row for row in rows(folder) if "loss" in row]
    return [row[name] for row in found for name in ("loss", "auxiliary/distillation_kl", "grad_norm")]


def test_with_all_of_the_vocabulary_a_mixture_trains_as_with_the_teacher_and_resumes(sources, tmp_path):
    mixture = f"[{{name = 'a', path = '{sources / 'one'}'}}, {{name = 'b', path = '{sources / 'two'}', weight = 0.5}}]"
    common = {"training__dataset_path": None, "data__sources": mixture, "data__packing": "best_fit"}
    common |= {"lr_scheduler__total_steps": 3, "checkpoint__interval": 2}
    stored = {**common, "distillation__store": tmp_path / "stored"}
    argv = student(sources, tmp_path / "whole", **stored)
    lines = run_ranks(write_predictions, 1, argv, sources / "teacher", VOCABULARY, timeout=120)[0]
    assert [line.split(" x ")[1].split()[0] for line in lines] == [str(VOCABULARY)] * 2
    online = student(sources, tmp_path / "online", **common, distillation__teacher_path=sources / "teacher")
    parts = [student(sources, tmp_path / "parts", **stored, training__steps=steps) for steps in (2, 3)]
    run_ranks(train_all, 1, [argv, online, *parts])
    assert logged(tmp_path / "whole") == pytest.approx(logged(tmp_path / "online"), rel=1e-6)
    assert logged(tmp_path / "whole") == logged(tmp_path / "parts")
    for path in (tmp_path / "stored").glob(f"*/{META_FILE}"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"teacher": "a" * 64}))
    message = refused(parts[1], "--training.steps=4")
    assert f'and is "{"a" * 16} with {VOCABULARY} in float32". Restore what changed, or set checkpoint.allow' in message


@pytest.fixture(scope="module")
def stored(sources, tmp_path_factory):
    """Returns the folder that two ranks wrote, and the options of its run."""
    folder = tmp_path_factory.mktemp("stored")
    argv = student(sources, folder, distillation__store=folder / "two")
    run_ranks(write_predictions, 2, argv, sources / "teacher", timeout=120)
    return folder, argv


def only(folder):
    (found,) = folder.iterdir()
    return found


def test_two_ranks_write_what_one_writes_on_any_mesh(sources, stored, tmp_path):
    """Those of the fixture share the weights, and read rows of their own."""
    folder, _ = stored
    theirs = only(folder / "two")
    for axis, ranks in {"shard": 1, "tensor": 2, "context": 2, "pipeline": 2}.items():
        option = {f"parallelism__{axis}_parallel_degree": ranks} if ranks > 1 else {}
        argv = student(sources, tmp_path, distillation__store=tmp_path / axis, **option)
        run_ranks(write_predictions, ranks, argv, sources / "teacher", timeout=120)
        ours = only(tmp_path / axis)
        assert (theirs.name, (theirs / META_FILE).read_bytes()) == (ours.name, (ours / META_FILE).read_bytes())
        ids = [np.fromfile(each / IDS_FILE, dtype=np.uint16) for each in (theirs, ours)]
        values = [np.fromfile(each / VALUES_FILE, dtype=np.float32) for each in (theirs, ours)]
        assert (ids[0] == ids[1]).mean() > 0.999  # values that round otherwise change places
        np.testing.assert_allclose(*values, atol=1e-5)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_positions_are_those_of_the_tokens_that_are_read(sources, tmp_path, packing):
    config = load_config(student(sources, tmp_path, data__packing=packing))
    plan = preflight.resolve(config, world_size=1, device_type="cpu")
    dataset = open_dataset(training=config.training, data=config.data, tokenizer=plan.tokenizer)
    uses = np.arange(20)
    read = dataset.train_rows(seq_len=64, seed=0)(uses)[:, :-1]
    positions = dataset.train_positions(uses, seq_len=64, seed=0)
    tokens = dataset.store.tokens("train")[:]
    assert (tokens[positions] == read)[positions >= 0].all()
    assert (read[positions < 0] == dataset.store.meta.eos_id).all()
    assert (positions < 0).any() == (packing == "best_fit")


def refused(argv, *changes):
    """Returns why a run with these options does not start."""
    config = load_config([*argv, *changes])
    plan = preflight.resolve(config, world_size=1, device_type="cpu")
    with pytest.raises(ConfigError) as caught:
        preflight.prepare(plan, launch=Launch(rank=1, local_rank=0, world_size=1))
    return str(caught.value)


def test_predictions_of_other_rows_are_refused(stored, tmp_path):
    _, argv = stored
    both = refused(argv, "--training.seq_len=32", "--distillation.temperature=1.5")
    remedy = "restore what changed, or set distillation.store to another folder and write them with"
    assert f"seq_len 64, and this run has 32; temperature 2.0, and this run has 1.5; {remedy}" in both
    assert "document_masking" in refused(argv, "--training.document_masking=false")
    assert "vocab_size 2048, and this run has 2100" in refused(argv, "--model.args.vocab_size=2100")
    nearest = "it has none for these tokens, and the nearest are for"
    assert f"{nearest} held_out_fraction 0.0, and this run has 0.5; tokens" in refused(
        argv, "--data.held_out_fraction=0.5"
    )
    assert re.search(
        nearest + r' data "(\w+)", and this run has "\1 best_fit"; ', refused(argv, "--data.packing=best_fit")
    )
    assert "it has none for these tokens; write them with" in refused(argv, f"--distillation.store={tmp_path}")


def test_damaged_predictions_are_refused(stored, tmp_path):
    folder, argv = stored
    copy = tmp_path / "copy"
    shutil.copytree(folder / "two", copy)
    content, meta = only(copy), only(copy) / META_FILE
    argv = [*argv, f"--distillation.store={copy}"]
    values = json.loads(meta.read_text())
    meta.write_text(json.dumps(values | {"tokenizer": "0" * 64}))
    assert f"tokenizer {'0' * 64}, and this run has" in refused(argv).replace('"', "")
    meta.write_text(json.dumps(values | {"k": "many"}))
    assert "is corrupt" in refused(argv)
    meta.write_text(json.dumps(values))
    size = (content / VALUES_FILE).stat().st_size
    with (content / VALUES_FILE).open("rb+") as file:
        file.truncate(size - 4)
        assert f"train.values has {size - 4:,} bytes, not {size:,}" in refused(argv)
        file.truncate(size)
    (content / IDS_FILE).write_bytes(b"\xff" * (content / IDS_FILE).stat().st_size)
    with pytest.raises(Exception, match="it holds an id or a log-probability that no teacher has"):
        run_ranks(train_all, 1, [argv])
    content.rename(content.with_name(f"{content.name}.partial"))
    assert "it was not written to its end" in refused(argv)


def test_a_killed_writer_leaves_nothing_that_a_run_takes(sources, tmp_path):
    store = tmp_path / "stored"
    argv = student(sources, tmp_path, distillation__store=store, training__dataset_path=sources / "all")
    script = [sys.executable, str(ROOT / "scripts" / "store_predictions.py"), f"--teacher={sources / 'teacher'}"]
    process = subprocess.Popen([*script, "--rows=1", *argv], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not [*store.glob("*.partial/train.values")]:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert "it was not written to its end" in refused(argv)
    lines = run_ranks(write_predictions, 1, argv, sources / "teacher", timeout=120)[0]
    assert "16 predictions" in lines[0]
    assert lines == run_ranks(write_predictions, 1, argv, sources / "teacher", timeout=120)[0]


def test_the_script_refuses_what_a_teacher_cannot_predict(sources, stored, capsys):
    _, argv = stored
    given = [f"--teacher={sources / 'teacher'}", *argv]
    assert store_predictions.main([*given, "--k=9999", "--training.seq_len=200000"]) == 2
    assert store_predictions.main([*given, "--teacher=absent"]) == 2
    assert store_predictions.main([*given, "--distillation.temperature=0"]) == 2
    assert store_predictions.main([f"--teacher={sources}", *argv]) == 2
    found = capsys.readouterr().err
    assert "--k = 9999: must be from 1 to 2048" in found
    assert "training.seq_len = 200000: must be from 1 to" in found
    assert "absent: there is no such folder" in found
    assert "distillation.temperature = 0.0: must be from 0.01" in found
    assert "the folder has no complete checkpoint" in found
