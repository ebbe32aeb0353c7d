"""Arguments of run_train.sh, and its setup of the environment."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from torchtitan_clone.commands.train import launcher_options
from torchtitan_clone.config.messages import REQUIREMENTS

REPO = Path(__file__).parents[2]


PROBE = "import os, sys\nprint(os.environ.get('WORLD_SIZE'), *sys.argv[1:])\n"
"""A module to train with, which prints what it was started with."""


def run_train(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    cleared = {"NGPU", "CONFIG_FILE", "LOG_RANK", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"}
    cleared |= {"PYTHON", "NO_SETUP", "COMM_MODE", "TRAIN_FILE", "MODULE", "CONFIG"}
    inherited = {key: value for key, value in os.environ.items() if key not in cleared}
    return subprocess.run(
        [REPO / "run_train.sh", *arguments],
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def probe(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """Runs run_train.sh, which starts the probe in place of training."""
    (cwd / "probe.py").write_text(PROBE)
    chosen = {"PYTHON": sys.executable, "NO_SETUP": "1", "TRAIN_FILE": "probe"}
    return run_train(*arguments, cwd=cwd, **(chosen | environment))


DEFAULT = f"--job.config_file={REPO}/train_configs/debug_model.toml"


def test_run_train_passes_its_arguments_on(tmp_path):
    python = tmp_path / "python"  # which passes the check of the environment
    python.write_text('#!/bin/sh\necho "$*"\n')
    python.chmod(0o755)
    answer = run_train("--training.steps=20", "two words", cwd=tmp_path, PYTHON=str(python))
    assert answer.stdout == "-m torchtitan_clone.commands.train --training.steps=20 two words\n"
    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.parametrize(
    ("environment", "arguments", "started"),
    [
        ({"NGPU": "1"}, ["--training.steps=20"], f"{DEFAULT} --training.steps=20"),
        ({"CUDA_VISIBLE_DEVICES": ""}, [], DEFAULT),
        ({"CONFIG_FILE": "my.toml"}, ["--model.flavor=1B"], "--job.config_file=my.toml --model.flavor=1B"),
        ({}, ["my.toml", "--model.flavor=1B"], f"{DEFAULT} --job.config_file=my.toml --model.flavor=1B"),
        ({}, ["llama3_8b"], f"{DEFAULT} --job.config_file=llama3_8b"),
        ({}, ["probe.py"], f"{DEFAULT} --job.config_file=probe.py"),
        ({}, ["training.steps=3"], f"{DEFAULT} training.steps=3"),
        ({"COMM_MODE": "fake_backend"}, ["--a=b"], f"{DEFAULT} --a=b --comm.mode=fake_backend"),
    ],
)
def test_arguments_of_a_process(tmp_path, environment, arguments, started):
    answer = probe(*arguments, cwd=tmp_path, **({"NGPU": "1"} | environment))
    assert answer.stdout == f"None {started}\n"
    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.parametrize("words", ["--dry-run", "--job.dry_run true", "--comm.mode=fake_backend"])
def test_a_simulation_is_one_process_with_the_world_size(tmp_path, words):
    answer = probe(*words.split(), cwd=tmp_path, NGPU="4", NNODES="2")
    assert (answer.stdout, answer.stderr) == (f"8 {DEFAULT} {words}\n", "")


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        ({}, "--nproc-per-node=2 --log-rank=0"),
        ({"LOG_RANK": "0,1", "LOG_FOLDER": "a b"}, "--nproc-per-node=2 --log-rank=0,1 --log-folder=a b"),
        (
            {"NODE_RANK": "1", "MASTER_ADDR": "head", "NNODES": "3"},
            "--nproc-per-node=2 --log-rank=0 --nnodes=3 --node-rank=1 --master-addr=head",
        ),
        ({"MASTER_PORT": "7", "NNODES": "3"}, "--nproc-per-node=2 --log-rank=0 --nnodes=3 --master-port=7"),
    ],
)
def test_variables_of_the_launcher(monkeypatch, variables, options):
    for name in ("LOG_RANK", "LOG_FOLDER", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    nodes = int(variables.get("NNODES", 1))
    assert " ".join(launcher_options(processes=2, nodes=nodes, module="torchtitan_clone.train")) == options
    assert "--train-file=mine" in launcher_options(processes=2, nodes=nodes, module="mine")


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"COMM_MODE": "local_tensor"}, "COMM_MODE = local_tensor: is not supported; set it to fake_backend to"),
        ({"COMM_MODE": "fake"}, "COMM_MODE = fake: must be default or fake_backend; change or unset it\n"),
        ({"TRAIN_FILE": "torchtitan.train"}, "TRAIN_FILE = torchtitan.train: belongs to torchtitan; unset it\n"),
        ({"TRAIN_FILE": "mine/train.py"}, "TRAIN_FILE = mine/train.py: must be a module, such as my_package.train,"),
        ({"ALLOCATOR": "defualt"}, "ALLOCATOR = defualt: must be default; change or unset it\n"),
        ({"NGPU": "abc"}, "NGPU = abc: must be an integer of at least 1; change or unset it\n"),
        ({"NGPU": "08"}, "NGPU = 08: must be an integer of at least 1; change or unset it\n"),
        ({"NGPU": "0"}, "NGPU = 0: must be an integer of at least 1; change or unset it\n"),
        ({"NGPU": "9" * 21}, f"NGPU = {'9' * 21}: must be an integer of at least 1; change or unset it\n"),
        ({"NNODES": "-2"}, "NNODES = -2: must be an integer of at least 1; change or unset it\n"),
    ],
)
def test_a_variable_that_cannot_be_followed_is_one_line(tmp_path, environment, problem):
    answer = probe(cwd=tmp_path, **({"NGPU": "2"} | environment))
    assert (answer.returncode, answer.stdout, len(answer.stderr.splitlines())) == (2, "", 1)
    assert answer.stderr.startswith(f"error: {problem}")


def test_the_variables_of_later_versions_are_noted(tmp_path):
    names = {"MODULE": "llama3", "CONFIG": "llama3_debugmodel"}
    answer = probe(cwd=tmp_path, NGPU="1", **names)
    assert answer.stdout == f"None {DEFAULT}\n"
    assert answer.stderr == "note: MODULE and CONFIG of torchtitan are not read; set CONFIG_FILE to a TOML file\n"
    assert probe(cwd=tmp_path, NGPU="1", CONFIG_FILE="my.toml", **names).stderr == ""


def test_another_system_is_one_line_before_anything_is_installed(tmp_path):
    uname = tmp_path / "uname"
    uname.write_text("#!/bin/sh\necho Darwin\n")
    uname.chmod(0o755)
    answer = probe(cwd=tmp_path, NGPU="1", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (answer.returncode, answer.stdout, len(answer.stderr.splitlines())) == (2, "", 1)
    assert answer.stderr.startswith("setup: Darwin is not supported: processes use interfaces of Linux (/proc, ")


@pytest.mark.parametrize("option", ['[comm]\nmode = "fake_backend"\n', "[job]\ndry_run = true\n"])
def test_a_file_that_asks_for_a_simulation_starts_one_process(tmp_path, option):
    (tmp_path / "my.toml").write_text(option)
    (tmp_path / "mine.py").write_text("import os, sys\nprint(os.environ['WORLD_SIZE'], 'torch' in sys.modules)\n")
    environment = {"CONFIG_FILE": "my.toml", "TRAIN_FILE": "mine", "NO_SETUP": "1", "PYTHON": sys.executable}
    answer = run_train(cwd=tmp_path, NGPU="4", **environment)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "4 False\n", "")


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({}, "error: NNODES = 2 and NODE_RANK is not set; set it to the index of this node, from 0"),
        (
            {"NODE_RANK": "0"},
            "error: NNODES = 2 and MASTER_ADDR is not set; set it to the address of the node with NODE_RANK 0",
        ),
        ({"NODE_RANK": "2", "MASTER_ADDR": "127.0.0.1"}, "error: NODE_RANK = 2: must be at most 1 with NNODES 2"),
    ],
)
def test_missing_or_invalid_node_variables(tmp_path, environment, problem):
    answer = run_train(cwd=tmp_path, PYTHON=sys.executable, NO_SETUP="1", NGPU="1", NNODES="2", **environment)
    assert (answer.returncode, answer.stderr) == (2, f"{problem}\n")


INSTALLER = """#!/bin/bash
case "$*" in
*check_environment.py*) [ -e {folder}/installed ] ;;
*"-m venv"*) mkdir "$3/bin"; cp "$0" "$3/bin/python" ;;
*"-m pip"*) readlink /proc/$$/fd/9 >>{folder}/locked; sleep 0.5; touch {folder}/installed ;;
*importlib*) exit 1 ;;
*torchtitan_clone.commands.train*) echo "trained, $(readlink /proc/$$/fd/9)" ;;
esac
"""
"""A Python that installs nothing, and says what its descriptor 9 is."""


def test_one_of_two_processes_installs_and_locks_a_regular_file(tmp_path):
    """NFS does not tell other machines of a lock on a folder."""
    copy = tmp_path / "copy"
    (copy / "scripts").mkdir(parents=True)
    for name in ("run_train.sh", "scripts/setup_env.sh", "scripts/constraints.txt"):
        shutil.copy(REPO / name, copy / name)
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python3"
    python.write_text(INSTALLER.format(folder=tmp_path))
    python.chmod(0o755)
    inherited = {key: value for key, value in os.environ.items() if key not in {"PYTHON", "NO_SETUP", "NNODES"}}
    env = inherited | {"PATH": f"{python.parent}:{os.environ['PATH']}", "NGPU": "1"}
    pipe, command = subprocess.PIPE, [copy / "run_train.sh"]
    both = [subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert [out for out, _ in outputs] == ["trained, \n"] * 2
    assert sum("waiting for another process" in err for _, err in outputs) == 1
    (locked,) = (tmp_path / "locked").read_text().splitlines()
    assert Path(locked) == copy / ".venv.lock"
    assert Path(locked).is_file()


def test_unusable_python_is_reported_with_the_reason(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    bare = str(tmp_path / "bare" / "bin" / "python")
    answer = run_train(cwd=tmp_path, PYTHON=bare)
    assert answer.returncode == 2
    assert answer.stderr.startswith(
        f"setup: PYTHON={bare} cannot be used: torch is not installed, torchdata is not installed"
    )
    answer = run_train(cwd=tmp_path, PYTHON=bare, NO_SETUP="1", NGPU="1")
    assert (answer.returncode, len(answer.stderr.splitlines())) == (2, 1)
    assert answer.stderr.startswith(f"error: the package torch is not installed in {bare}; start with ./run_train.sh")


@pytest.mark.parametrize("words", ["--help", "--help checkpoint", "-h seed"])
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_help_is_printed_by_a_bare_python_that_installs_nothing(tmp_path, words, ranks):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(Path(sys.base_prefix, "bin", "python3"))
    copy = tmp_path / "copy"
    (copy / "scripts").mkdir(parents=True)
    for name in ("run_train.sh", "scripts/setup_env.sh"):
        shutil.copy(REPO / name, copy / name)
    (copy / "torchtitan_clone").symlink_to(REPO / "torchtitan_clone")
    inherited = {key: value for key, value in os.environ.items() if key not in {"PYTHON", "NO_SETUP", "PYTHONPATH"}}
    environment = inherited | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "NGPU": ranks, "PIP_NO_INDEX": "1"}
    command = [copy / "run_train.sh", *words.split()]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "seed" in answer.stdout
    assert not (copy / ".venv").exists()


@pytest.mark.parametrize(
    ("version", "fits"), [("2.11.0", True), ("2.13.0+cpu", True), ("2.14", False), ("2.9.1", False)]
)
def test_installed_versions_are_compared_as_numbers(tmp_path, version, fits):
    answer = check_installed(tmp_path, "tried>=2.11,<2.14", version=version)
    assert answer.returncode == (0 if fits else 1)
    assert answer.stderr == ("" if fits else f"tried {version} does not satisfy tried>=2.11,<2.14\n")


def test_messages_name_the_requirements_of_the_package():
    """Of a package that is on no index, pip cannot install an extra."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    known = {*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)}
    assert set(REQUIREMENTS.values()) < known
    assert [name for name, requirement in REQUIREMENTS.items() if not requirement.startswith(name)] == []
    sources = [*(REPO / "torchtitan_clone").rglob("*.py"), *(REPO / "scripts").rglob("*.py")]
    assert [
        source for source in sources if "torchtitan_clone[" in source.read_text().replace("torchtitan_clone[^", "")
    ] == []


def check_installed(folder, requirement, *, version):
    """Runs check_environment.py for one requirement, where this version of the package is installed."""
    name = requirement.partition(">=")[0]
    (folder / "pyproject.toml").write_text(f'[project]\ndependencies = ["{requirement}"]')
    installed = folder / f"{name}-{version}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    command = [sys.executable, REPO / "scripts" / "check_environment.py", folder / "pyproject.toml"]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("version", ["2.11.0", "2.15.0+cu130", "constraint"])
def test_tried_versions_of_torch_are_accepted_and_one_is_installed(tmp_path, version):
    dependencies = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["dependencies"]
    (requirement,) = (line for line in dependencies if line.startswith("torch>="))
    constraints = (REPO / "scripts" / "constraints.txt").read_text().splitlines()
    (pinned,) = (line for line in constraints if line.startswith("torch=="))
    version = pinned.partition("==")[2] if version == "constraint" else version
    assert check_installed(tmp_path, requirement, version=version).returncode == 0
