"""The wheel alone, in an environment of its own away from the checkout: the command `torchtitan_clone` does all."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.runs import MODEL
from torchtitan_clone.commands import SUMMARIES

ROOT = Path(__file__).parents[2]
SMALL = [
    "--training.steps=2", "--training.seq_len=64", "--training.local_batch_size=2", "--lr_scheduler.warmup_steps=1",
    "--training.global_batch_size=2", "--compile.enable=false",
    *(f"--model.args.{key}={value}" for key, value in MODEL.items()),
]  # fmt: skip
ALL_HELP = """
import contextlib, io, sys
from torchtitan_clone.commands import SUMMARIES, main
for name in sorted(SUMMARIES, key="train".__eq__):  # the last, as it ends the process
    with contextlib.suppress(SystemExit):
        main([*name.split(), "--help"])
"""
IN_ONE_PROCESS = """
import sys
from torchtitan_clone.commands import main
for words in sys.argv[1:]:
    print(main(words.split()), words.split()[0], flush=True)
"""


class Installed:
    """An environment with the wheel, and a folder in which commands are typed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.bin = folder / "venv" / "bin"

    @property
    def package(self) -> Path:
        """The folder of the package."""
        (found,) = self.bin.parent.glob("lib/python*/site-packages/torchtitan_clone")
        return found

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment."""
        cleared = {"PYTHONPATH", "CONFIG_FILE", "NGPU", "TRAIN_FILE", "RANK", "WORLD_SIZE"}
        inherited = {key: value for key, value in os.environ.items() if key not in cleared}
        environment = inherited | {"PATH": f"{self.bin}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **variables}
        environment |= {"XDG_CACHE_HOME": str(self.folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}
        command = [self.bin / words[0], *words[1:]]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=240, check=False
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Builds the wheel and installs it without its requirements, which are those of the environment of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    copy = folder / "copy"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("torchtitan_clone", "train_configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    built = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", f"--wheel-dir={folder}", str(copy)]
    # Not in the checkout, where pip would find the package installed already.
    away = {"cwd": folder, "env": {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}}
    subprocess.run([*pip, *built], check=True, capture_output=True, **away)
    shutil.rmtree(copy)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, capture_output=True)
    python = folder / "venv" / "bin" / "python"
    install = [*pip, "--python", python, "install", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True, **away)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    # A path file in a path that a path file adds is not read: the checkout that is installed there is not found.
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    (folder / "work").mkdir()
    return Installed(folder)


def test_the_demo_trains_and_its_last_lines_work(installed: Installed, corpus: Path) -> None:
    data = (f"--training.dataset_path={corpus}", "--data.held_out_fraction=0.1", "--metrics.log_freq=1")
    done = installed.run("torchtitan_clone", "train", *SMALL, *data)
    assert (done.returncode, "training is complete: step 2 of 2" in done.stdout) == (0, True), done.stdout + done.stderr
    named = dict(re.findall(r"\b(report|export|generate) +(.*)", done.stdout.partition("training is complete")[2]))
    assert named == {
        "report": "torchtitan_clone report outputs/debug_model",
        "export": "torchtitan_clone convert to_hf outputs/debug_model/checkpoint/step-2 FOLDER",
        "generate": 'torchtitan_clone generate outputs/debug_model --prompt="..."',
    }
    for text in named.values():
        command = text.replace('"...', '"import').replace('"', "").replace("FOLDER", "exported").split()
        answer = installed.run(*command)
        assert answer.returncode == 0, answer.stderr
    assert (installed.folder / "outputs/debug_model/report.html").stat().st_size > 2**20
    assert (installed.folder / "exported/config.json").exists()
    others = [
        "plan debug_model --gpus=2 --count=1",
        f"prepare --job.config_file=debug_model --training.dataset_path={corpus}",
        "inspect rows --folder=outputs/debug_model --row=0",
        "checkpoint verify outputs/debug_model/checkpoint",
        "submit --launch.nodes=2 --dry-run",
        "kubernetes --launch.image=titan:1 --checkpoint.folder=s3://bucket/run --launch.gpus_per_node=1 --dry-run",
    ]
    answer = installed.run("python", "-c", IN_ONE_PROCESS, *others)
    ends = [line for line in answer.stdout.splitlines() if re.fullmatch(r"\d [a-z]+", line)]
    assert ends == [f"0 {words.split()[0]}" for words in others], answer.stdout + answer.stderr
    assert str(installed.package / "launch/slurm_job.sh") in answer.stdout


def test_every_command_says_what_it_does(installed: Installed) -> None:
    overview = installed.run("torchtitan_clone", "--help", PYTHONPROFILEIMPORTTIME="1")
    imported = {line.rpartition("|")[2].strip() for line in overview.stderr.splitlines()}
    assert (overview.returncode, "torchtitan_clone" in imported, "torch" in imported) == (0, True, False)
    assert [name for name in SUMMARIES if f"  {name} " not in overview.stdout] == []
    found = installed.run("python", "-u", "-c", ALL_HELP)
    assert found.returncode == 0, found.stderr
    named = re.findall(r"^(?:usage: | +)torchtitan_clone ((?:convert )?\w+)", found.stdout, re.MULTILINE)
    assert SUMMARIES.keys() <= {*named}
    assert not re.search(r"scripts/|run_train\.sh", found.stdout)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["trian"], "torchtitan_clone trian: no such command; did you mean train?"),
        (["convert", "to_hd", "a"], "torchtitan_clone convert to_hd: no such command; did you mean convert to_hf?"),
        (["train", "x" * 300], 'command line: "xxx'),
        (["convert"], "torchtitan_clone convert: no such command; did you mean convert "),
        (["train", "llama3_8b", "--optimizer.lr=-1"], "optimizer.lr = -1.0: must be above 0"),
        (["train", "--model.name=rwkv"], 'model.name = "rwkv": no such model'),
    ],
)
def test_what_is_wrong_is_one_line(installed: Installed, words: list[str], complaint: str) -> None:
    answer = installed.run("torchtitan_clone", *words)
    assert (answer.returncode, answer.stdout, len(answer.stderr.splitlines())) == (2, "", 1), answer.stderr
    assert answer.stderr.startswith(f"error: {complaint}")


def test_every_file_of_the_package_is_in_the_wheel(installed: Installed) -> None:
    """Sources of C++, the page of reports, tables of hardware, the script of Slurm jobs, train_configs/."""
    places = {ROOT / "torchtitan_clone": Path(), ROOT / "train_configs": Path("train_configs")}
    files = [(path, source) for source in places for path in source.rglob("*") if path.is_file()]
    wanted = {places[source] / path.relative_to(source) for path, source in files if "__pycache__" not in path.parts}
    assert {Path("train_configs/debug_model.toml"), Path("launch/slurm_job.sh")} < wanted
    assert [path for path in wanted if not (installed.package / path).is_file()] == []
