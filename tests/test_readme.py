"""Every command of the README, of CONTRIBUTING.md and of docs/ runs, and every file in train_configs/ trains."""

import importlib.util
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.marks import needs_door
from tests.support.runs import make_corpus, train

pytestmark = pytest.mark.documentation
ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *ROOT.glob("CONTRIBUTING.md"), *sorted(ROOT.glob("docs/**/*.md"))]
NOT_EXECUTED = {
    r"^git clone": "needs a network",
    r"pip install": "changes the environment that runs the tests",
    r"^pre-commit install": "changes the repository's git hooks",
    r"^\.ci/run": "runs the tests themselves",
    r"report\.py.*--serve": "serves until it is interrupted; tests/tools/test_report.py does so",
    r"gpu_suite\.sh|my_machine\.toml": "needs a GPU",
    r"^(sudo )?apt(-get)? ": "installs system packages",
    r"^(sbatch|squeue|scancel|sinfo)": "needs Slurm",
    r"slurm/submit\.py(?!.*--dry-run)": "needs Slurm",
}
"""Commands that cannot run in a test, as patterns, each with the reason."""
if importlib.util.find_spec("lm_eval") is None:
    NOT_EXECUTED[r"scripts/evaluate\.py"] = 'needs the extra "eval"'
AT_ONCE = "scripts/lighthouse.py"
"""A block with this command is typed into several terminals, a line into each."""


def blocks(page: Path, *languages: str) -> list[str]:
    """Returns the code blocks of a page in one of these languages."""
    found = re.findall(r"^```(\w+)[^\n]*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


def commands(block: str) -> list[str]:
    """Commands of a block, with continued lines joined and without comments."""
    lines = block.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


SHELL = [(page, block) for page in PAGES for block in blocks(page, "sh", "bash")]
COMMANDS = list(dict.fromkeys(command for _, block in SHELL if AT_ONCE not in block for command in commands(block)))
"""In the order of the pages, each once; a page whose commands need a file makes it first."""
TERMINALS = {f"{page.stem}-{index}": block for index, (page, block) in enumerate(SHELL) if AT_ONCE in block}
EXAMPLES = {f"{page.stem}-{index}": code for page in PAGES for index, code in enumerate(blocks(page, "python"))}
COMPILED = "llama3_8b"
"""The file that trains compiled, which takes seconds, if the file says so."""
GPUS = {"llama3_70b": 64, "llama3_405b": 512, "qwen3_30b_a3b": 64, "deepseek_v3_671b": 1024}
"""Number of GPUs that a file is written for, if it is not 8."""
EXPERTS = ["--model.args.moe.num_experts=16", "--model.args.moe.hidden_dim=64"]
SMALL_MODEL = {
    "qwen3_30b_a3b": EXPERTS,
    "deepseek_v3_671b": [
        *EXPERTS, "--model.args.n_dense_layers=1", "--model.args.q_lora_rank=64", "--training.local_batch_size=2",
    ],
}  # fmt: skip
"""Options that make the model of a file small, beyond those of all files."""
# Training commands of the documentation run for minutes; these options limit each to seconds.
SMALL = [
    "--training.steps=3", "--lr_scheduler.warmup_steps=1", "--training.seq_len=64", "--training.local_batch_size=2",
    "--validation.steps=1", "--model.args.dim=64", "--model.args.n_heads=8", "--model.args.n_layers=4",
]  # fmt: skip


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Returns the folder in which the commands are typed: the repository's files, and some text."""
    folder = tmp_path_factory.mktemp("workplace")
    for name in ("run_train.sh", "scripts", "train_configs", "benchmarks", "tests", "torchtitan_clone"):
        (folder / name).symlink_to(ROOT / name)
    make_corpus(folder / "my_text")
    return folder


def shortened(command: str) -> str:
    """Returns the command with options that keep it short: a few steps of training, the collection of tests."""
    if "scripts/run_tests.sh" in command:
        return f"{command} --numprocesses=0 --collect-only -q {ROOT / 'tests' / 'optim'}"
    if "run_train.sh" in command and not re.search(r"--help|--dry-run|fake_backend", command):
        small = shlex.join(SMALL[1:] if "--training.steps" in command else SMALL)
        return f"{command.replace(' &', f' {small} &')} {small}"
    if "store_predictions.py" in command:
        return f"{command} --k=8 --training.seq_len=64"
    if "fake_backend" in command:
        return f"{command} --model.args.n_layers=2"
    if "inject_faults.py --grid" in command:
        return f"{command} --groups=2 --ranks=1 --places=commit"
    if "goodput.py" in command:
        return f"{command} --seconds=1 --every=0.5 --revive=0"
    if "benchmarks/checkpoint.py" in command:
        return f"{command} --gib=0.01 --saves=1"
    if "benchmarks/data.py" in command:
        text = "--text torchtitan_clone tests --mb=0.4 --tokens=100000 --large-tokens=1000000"
        return f"{command} {text} --rounds=1"
    if "scripts/plan.py" in command and "debug_model" not in command:
        return f"{command} --gpus=8 --model.args.n_layers=4"
    if "tests/campaigns/hub_configs.py" in command:
        return f"{command} --only=olmo2"
    if "tests/campaigns/memory.py" in command:
        return f"{command} --only='fp32, full' --layers=2"
    if "tests/campaigns/published.py" in command:
        return f"{command} --only=H200"
    if "benchmarks/experts.py" in command:
        return f"{command} --dim=64 --hidden=64 --tokens=64 --rounds=2"
    if "benchmarks/attention.py" in command:
        return f"{command} --shapes 1x2x8x16 --rounds=2"
    if re.search(r"benchmarks/(variants|starts).py", command):
        return f"{command} --rounds=2 -- {shlex.join(SMALL[1:])}"
    if "benchmarks/time_to_loss.py" in command:
        quick = re.sub(r"--training.steps=\d+", SMALL[0], command)
        return f"{quick} --rounds=2 -- --validation.freq=3 {shlex.join(SMALL)}"
    if "benchmarks/linear_attention.py" in command:
        return f"{command} --tokens=128 --rounds=2"
    if "benchmarks/optimizers.py" in command:
        return f"{command} --layers=1 --dim=64 --rounds=2"
    if "benchmarks/generation.py" in command:
        return f"{command} --families llama3 --dim=64 --tokens=4 --rounds=2"
    if "hostile_folders.py" in command:
        return f"{command} --count=1 --timeout=120"
    if "fuzz_checkpoint.py" in command:
        return command.replace("--count=120", "--count=3")
    if "golden.py" in command:
        return f"{re.sub('--repo=[^ ]+', '', command)} --only='one rank fp32'"
    if "tests/campaigns/planner.py" in command:
        return f"{command} --rows=6"
    if "benchmarks/peers.py" in command:
        return re.sub("--rounds [0-9]+", "--rounds 2", command).replace("--size host", "--size tiny")
    return command


def environment_of(folder: Path, *, python: Path | str) -> dict[str, str]:
    """Returns the environment variables of a command: this Python, and caches in the folder."""
    environment = {**os.environ, "PYTHON": str(python), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    environment["PATH"] = f"{Path(python).parent}:{Path(sys.executable).parent}:{environment['PATH']}"
    return environment


def execute(command: str, folder: Path, *, python: Path | str):
    environment = environment_of(folder, python=python)
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_the_readme_has_commands():
    assert COMMANDS[:2] == ["./run_train.sh", "scripts/run_tests.sh"]
    assert TERMINALS


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command, workplace, python):
    for pattern, reason in NOT_EXECUTED.items():
        if re.search(pattern, command):
            pytest.skip(f"{reason}: {command}")
    done = execute(shortened(command), workplace, python=sys.executable if command == COMMANDS[0] else python)
    assert done.returncode == 0, done.stdout + done.stderr
    if "run_train.sh" in command and not re.search(r"--help|--dry-run|fake_backend", command):
        assert "training is complete" in done.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_python_examples(name, tmp_path, python):
    (tmp_path / "example.py").write_text(EXAMPLES[name])
    done = execute("python example.py", tmp_path, python=python)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", TERMINALS)
@needs_door("torchft")
def test_replica_groups_in_several_terminals(name, workplace, python):
    """Runs the lighthouse in one terminal, the replica groups in the others."""
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    # Of so few steps one group would train all, while the other starts.
    both = "--fault_tolerance.min_replica_size=2"
    serve, *groups = [f"{shortened(line.replace('29510', port))} {both}" for line in commands(TERMINALS[name])]
    common = {"cwd": workplace, "env": environment_of(workplace, python=python), "text": True}
    lighthouse = subprocess.Popen(["bash", "-c", f"exec {serve}"], stdout=subprocess.PIPE, **common)
    try:
        assert lighthouse.stdout is not None
        assert "TORCHFT_LIGHTHOUSE=http://" in lighthouse.stdout.readline()
        started = [
            subprocess.Popen(["bash", "-c", group], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **common)
            for group in groups
        ]
        for process in started:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output
            assert "training is complete" in output
            assert "2 replica groups, this one is" in output
    finally:
        lighthouse.kill()


@pytest.mark.parametrize("file", sorted((ROOT / "train_configs").glob("*.toml")), ids=lambda file: file.name)
def test_train_configs_resolve_and_train(file, workplace, tmp_path):
    """Checks each shipped file on its GPUs, and trains it with a small model on local text."""
    tokenizer = ROOT / "torchtitan_clone" / "data" / "assets" / "stdlib_tokenizer"
    ranks = GPUS.get(file.stem, 8)
    words = [f"--job.config_file={file}", f"--model.hf_assets_path={tokenizer}", f"--job.dump_folder={tmp_path}"]
    code, output = train([*words, "--dry-run"], log_folder=tmp_path, env={"WORLD_SIZE": str(ranks)})
    assert code == 0, output
    assert f"{ranks} ranks" in output
    small = [
        *words, *SMALL, f"--training.dataset_path={workplace / 'my_text'}",
        "--model.args.vocab_size=2048", "--training.global_batch_size=2", "--compile.backend=aot_eager",
        *(() if file.stem == COMPILED else ["--compile.enable=false"]),
        f"--data.cache_folder={workplace / 'cache'}", "--data.num_workers=0",
        "--parallelism.data_parallel_shard_degree=-1", "--parallelism.tensor_parallel_degree=1",
        "--parallelism.pipeline_parallel_degree=1", "--parallelism.expert_parallel_degree=1",
        *SMALL_MODEL.get(file.stem, ()),
    ]  # fmt: skip
    code, output = train(small, log_folder=tmp_path)
    assert code == 0, output
    assert "training is complete: step 3 of 3" in output


def test_the_stand_in_does_what_python_does(python, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import os, sys\nprint(sys.argv, os.getcwd(), os.environ['WORD'])\nsys.exit(len(sys.argv))\n")
    found = {}
    for each in (sys.executable, python):
        done = execute(
            f"WORD=x {each} program.py 'a b' c; echo $?; {each} -c 'raise SystemExit(4)'", tmp_path, python=each
        )
        found[each] = done.returncode, done.stdout
    assert found[sys.executable] == found[python] == (4, f"['program.py', 'a b', 'c'] {tmp_path} x\n3\n")
    program.write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen([python, program], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(60) == -15


def test_streams_of_the_stand_in_close_when_it_is_ended_while_it_starts(python, tmp_path):
    """Who reads the output of a process that was ended early must not wait forever."""
    for delay in range(0, 60, 2):
        process = subprocess.Popen([python, "-m", "this"], stdout=subprocess.PIPE, cwd=tmp_path)
        time.sleep(delay / 1000)
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode in (0, -15)
