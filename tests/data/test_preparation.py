"""A source is tokenized in parts: what is killed continues after them, and tasks can share them.

Runs scripts/prepare_data.py, too.
"""

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.corpora import TOKENIZER, files_below, jsonl, prepare_parts, prepare_store, texts, write
from tests.support.harness import run_ranks
from torchtitan_clone.commands import prepare_data
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema_training import Data, Training
from torchtitan_clone.data.sources import find_source

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data.py"
PROCESSES = multiprocessing.get_context("forkserver")
NUM_FILES = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Returns a folder with files of different sizes, one of them without text."""
    rows = texts(60 * (NUM_FILES + 1), words=100)
    files = {f"{number}.jsonl": jsonl(rows[60 * number : 60 * number + 120]) for number in range(NUM_FILES)}
    return write(tmp_path_factory.mktemp("corpus"), files | {"empty.txt": ""})


def prepare(corpus: Path, *, cache: Path, part_bytes: int = 1 << 28):
    """Returns the store of a corpus."""
    source = find_source(Training(dataset_path=str(corpus)))
    data = Data(cache_folder=str(cache), prepare_processes=1)
    return prepare_store(source, tokenizer=TOKENIZER, data=data, part_bytes=part_bytes)


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the files of the only store of a cache."""
    (store,) = (folder / "stores").iterdir()
    return {path.name: path.read_bytes() for path in store.iterdir()}


def finished(cache: Path) -> dict[str, tuple[int, int]]:
    """Returns the inode and the time of the last file of every part that is finished."""
    found = {path.parent.name: path.stat() for path in cache.glob("sources/*/parts/*/meta.json")}
    return {name: (status.st_ino, status.st_mtime_ns) for name, status in found.items()}


def test_parts_do_not_change_the_store(tmp_path, corpus):
    for name, part_bytes in (("one", 1 << 28), ("every file", 1), ("some", 20_000)):
        prepare(corpus, cache=tmp_path / name, part_bytes=part_bytes)
    assert contents(tmp_path / "one") == contents(tmp_path / "every file") == contents(tmp_path / "some")
    assert files_below(tmp_path / "one") == files_below(tmp_path / "every file")


def test_a_killed_preparation_continues_after_its_parts(tmp_path, corpus):
    cache = tmp_path / "cache"
    generator = random.Random(0)
    before: dict[str, tuple[int, int]] = {}
    while len(before) < NUM_FILES - 1:
        process = PROCESSES.Process(target=prepare, args=(corpus,), kwargs={"cache": cache, "part_bytes": 1})
        process.start()
        wanted = len(before) + generator.randint(1, 3)
        while len(finished(cache)) < wanted and process.is_alive():
            time.sleep(0.002)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert before.items() <= finished(cache).items()
        before = finished(cache)
    prepare(corpus, cache=cache, part_bytes=1)
    prepare(corpus, cache=tmp_path / "fresh")
    assert contents(cache) == contents(tmp_path / "fresh")
    assert files_below(cache) == files_below(tmp_path / "fresh")


def test_tasks_share_the_parts(tmp_path, corpus):
    source = find_source(Training(dataset_path=str(corpus)))
    data = Data(cache_folder=str(tmp_path / "cache"), prepare_processes=1)
    for task, is_last in ((2, False), (0, False), (1, True)):
        before = finished(tmp_path / "cache")
        assert prepare_parts(source, tokenizer=TOKENIZER, data=data, task=task, tasks=3, part_bytes=1) == is_last
        assert before.items() <= finished(tmp_path / "cache").items()
    assert len(finished(tmp_path / "cache")) == NUM_FILES + 1
    prepare(corpus, cache=tmp_path / "cache", part_bytes=1)
    prepare(corpus, cache=tmp_path / "fresh")
    assert contents(tmp_path / "cache") == contents(tmp_path / "fresh")


def test_parts_of_another_preparation_are_kept(tmp_path, corpus):
    source = find_source(Training(dataset_path=str(corpus)))
    data = Data(cache_folder=str(tmp_path), prepare_processes=1, held_out_fraction=0.5)
    assert not prepare_parts(source, tokenizer=TOKENIZER, data=data, task=0, tasks=2, part_bytes=1)
    before = finished(tmp_path)
    prepare(corpus, cache=tmp_path, part_bytes=1)
    assert finished(tmp_path) == before


def test_parts_of_a_small_corpus_are_removed(tmp_path):
    """None of the documents is held out by chance, so that parts with another fraction are joined."""
    folder = write(tmp_path / "corpus", {f"{number}.txt": text for number, text in enumerate(texts(3, words=50))})
    prepare(folder, cache=tmp_path / "cache")
    assert contents(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("sources/*/parts/*"))


def prepare_as_a_guest(folder):
    """Opens what another user has prepared; returns its tokens."""
    os.chdir(folder)  # whose parents a guest may not enter
    if os.geteuid() == 0:
        os.seteuid(65534)
    assert not os.access("cache", os.W_OK, effective_ids=True)
    return sum(prepare(Path("corpus"), cache=Path("cache")).meta.tokens.values())


def test_a_store_of_another_user_is_read(tmp_path, corpus):
    shutil.copytree(corpus, tmp_path / "corpus")
    (tokens,) = run_ranks(prepare_as_the_owner, 1, tmp_path)
    for path in (*tmp_path.rglob("*"), tmp_path):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert run_ranks(prepare_as_a_guest, 1, tmp_path) == [tokens]
    finally:
        for path in (tmp_path, *tmp_path.rglob("*")):
            path.chmod(0o755)


def prepare_as_the_owner(folder):
    """Prepares a corpus by the path that prepare_as_a_guest() opens it with; returns its tokens."""
    os.chdir(folder)
    return sum(prepare(Path("corpus"), cache=Path("cache")).meta.tokens.values())


def test_tasks_leave_the_list_of_hashes_alone(tmp_path, corpus):
    """They hold no common lock: two that wrote it would remove each other's file."""
    folder, cache = shutil.copytree(corpus, tmp_path / "corpus"), tmp_path / "cache"
    prepare(folder, cache=cache)
    (listing,) = cache.glob("sources/*/files.json")
    before = listing.read_bytes()
    write(folder, {"more.jsonl": jsonl(["text"])})
    source = find_source(Training(dataset_path=str(folder)))
    data = Data(cache_folder=str(cache), prepare_processes=1)
    assert prepare_parts(source, tokenizer=TOKENIZER, data=data, task=0, tasks=1)
    assert listing.read_bytes() == before
    prepare(folder, cache=cache)
    assert listing.read_bytes() != before


def test_files_of_finished_parts_are_not_read_again(tmp_path, corpus):
    folder = shutil.copytree(corpus, tmp_path / "corpus")
    write(folder, {"3.jsonl": jsonl(["text"]) + b"{\n"})
    source = find_source(Training(dataset_path=str(folder)))
    data = Data(cache_folder=str(tmp_path / "cache"), prepare_processes=1)
    options = {"tokenizer": TOKENIZER, "data": data, "part_bytes": 1}
    assert not prepare_parts(source, task=0, tasks=2, **options)
    for path in source.files[::2]:  # what cannot be read keeps its size and time
        status = path.stat()
        path.write_bytes(b"{" * status.st_size)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ConfigError, match=r"3\.jsonl:2"):
        prepare_parts(source, task=0, tasks=1, **options)
    before = finished(tmp_path / "cache")
    write(folder, {"3.jsonl": jsonl(["text", "another"])})
    assert prepare_parts(source, task=0, tasks=1, **options)
    assert before.items() <= finished(tmp_path / "cache").items()


def test_a_file_that_fails_while_it_is_read_is_named(tmp_path):
    """The first bytes of a process' memory are no memory: reading them is an error of input and output."""
    folder = write(tmp_path / "text", {"a.txt": "1"})
    (folder / "b.txt").symlink_to("/proc/self/mem")
    with pytest.raises(ConfigError, match=r"b\.txt cannot be read \(.*Input/output error\); remove it"):
        prepare(folder, cache=tmp_path / "cache")


@pytest.fixture(scope="module")
def script():
    """Returns the command."""
    return prepare_data


def test_the_script_prepares_as_an_array_of_tasks(tmp_path, corpus, script, monkeypatch, capsys):
    words = [f"--training.dataset_path={corpus}", f"--data.cache_folder={tmp_path / 'cache'}", "--part_mib=0.001"]
    outputs = []
    for task in (5, 7):
        for key, value in {"ID": task, "MIN": 5, "MAX": 7, "STEP": 2}.items():
            monkeypatch.setenv(f"SLURM_ARRAY_TASK_{key}", str(value))
        assert script.main(words) == 0
        outputs.append(capsys.readouterr().out)
    assert "task 0 of 2 is done" in outputs[0]
    prepare(corpus, cache=tmp_path / "fresh")
    assert contents(tmp_path / "cache") == contents(tmp_path / "fresh")
    (store,) = (tmp_path / "cache" / "stores").iterdir()
    assert str(store) in outputs[1]


def test_ctrl_c_ends_the_script_and_its_processes(tmp_path, script):
    """The terminal sends the signal to all of them. The same command continues."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # children of a job in the background ignore it
    files = {f"{number}.txt": text for number, text in enumerate(texts(20, words=20_000))}
    corpus, cache = write(tmp_path / "corpus", files), tmp_path / "cache"
    words = [f"--training.dataset_path={corpus}", f"--data.cache_folder={cache}", "--part_mib=0.001"]
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *words, "--data.prepare_processes=2"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    while process.poll() is None and not finished(cache):
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, "Traceback" in errors) == (130, "", False), errors
    assert script.main(words) == 0
    prepare(corpus, cache=tmp_path / "fresh")
    assert contents(cache) == contents(tmp_path / "fresh")


def test_the_script_reads_the_file_of_the_environment(tmp_path, corpus, script, monkeypatch):
    file = tmp_path / "my.toml"
    file.write_text(f'[training]\ndataset_path = "{corpus}"\n[data]\ncache_folder = "{tmp_path / "cache"}"\n')
    monkeypatch.setenv("CONFIG_FILE", str(file))
    assert script.main([]) == 0
    prepare(corpus, cache=tmp_path / "fresh")
    assert contents(tmp_path / "cache") == contents(tmp_path / "fresh")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--training.dataset_path=missing"], "no such file or folder"),
        (["--training.dataset=org/name"], "streamed"),
        (["--training.dataset_pth=x"], "dataset_path"),
        (["--data.held_out_fraction=2"], "data.held_out_fraction = 2.0: must be at least 0 and below 1"),
        (['--data.sources=[{name = "a", path = "x"}, {name = "a", path = "y"}]'], "an earlier source has this name"),
        (['--data.sources=[{name = "a"}]'], "set either path"),
        (['--data.sources=[{name = "a", path = "x"}]', "--training.dataset_path=y"], "data.sources names the data"),
    ],
)
def test_a_wrong_option_is_one_error(script, capsys, words, complaint):
    assert script.main(words) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--task=3", "--tasks=2"], "must be from 0 to 1"),
        (["--part_mib=nan"], "--part_mib=nan: must be a number above 0"),
        (["--part_mib=inf"], "--part_mib=inf"),
        (["--part_mib=0"], "--part_mib=0.0"),
    ],
)
def test_wrong_tasks_and_parts_are_one_error(script, capsys, words, complaint):
    with pytest.raises(SystemExit, match="2"):
        script.main(words)
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("ID", "x"), ("STEP", "0")])
def test_wrong_variables_of_an_array_are_one_error(script, capsys, monkeypatch, name, value):
    monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    assert script.main([]) == 2
    assert capsys.readouterr().err.startswith(f'error: $SLURM_ARRAY_TASK_{name} = "{value}": must be an integer')
