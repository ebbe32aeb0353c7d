"""Every command of the README and every file in train_configs/ runs."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_clone.testing.runs import make_corpus, train

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.strip()]
GPUS = {"llama3_70b": 64, "llama3_405b": 512}
"""What a file is made for, where that is not one node of 8."""
# Training commands as they stand take minutes; these keep each to seconds.
SMALL = [
    "--training.steps=3", "--lr_scheduler.warmup_steps=1", "--training.seq_len=64", "--training.local_batch_size=2",
    "--validation.steps=1", "--model.args.dim=64", "--model.args.n_heads=8",
]  # fmt: skip


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder to type the commands in: the repository's scripts, and some text."""
    folder = tmp_path_factory.mktemp("workplace")
    for name in ("run_train.sh", "scripts", "train_configs"):
        (folder / name).symlink_to(ROOT / name)
    make_corpus(folder / "my_text")
    return folder


def shortened(command: str) -> str:
    """The command, kept short: a training to some steps, the tests to their collection."""
    if "scripts/run_tests.sh" in command:
        return f"{command} --collect-only -q {ROOT / 'tests' / 'optim'}"
    if "run_train.sh" in command and not re.search(r"--help|--dry-run|fake_backend", command):
        small = shlex.join(SMALL[1:] if "--training.steps" in command else SMALL)
        return f"{command.replace(' &', f' {small} &')} {small}"
    if "inject_faults.py --grid" in command:
        return f"{command} --groups=2 --ranks=1 --places=commit"
    if "goodput.py" in command:
        return f"{command} --seconds=2 --every=1 --revive=0"
    if "benchmarks/checkpoint.py" in command:
        return f"{command} --gib=0.01 --saves=1"
    if "fuzz_checkpoint.py" in command:
        return command.replace("--count=120", "--count=3")
    if "benchmarks/" in command:
        return f"{command} -- {shlex.join(SMALL[1:])}"
    return command


def environment_of(folder: Path) -> dict[str, str]:
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    return environment


def execute(command: str, folder: Path):
    environment = environment_of(folder)
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_the_readme_has_commands():
    assert len(COMMANDS) >= 12
    assert COMMANDS[:2] == ["./run_train.sh", "scripts/run_tests.sh"]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_readme(command, workplace):
    done = execute(shortened(command), workplace)
    assert done.returncode == 0, done.stdout + done.stderr
    if "run_train.sh" in command and not re.search(r"--help|--dry-run|fake_backend", command):
        assert "training is complete" in done.stdout


def test_replica_groups_as_the_readme_starts_them(workplace):
    """The server in one terminal, two replica groups in two others."""
    (block,) = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    # Of so few steps one group would do all, while the other starts.
    both = "--fault_tolerance.min_replica_size=2"
    serve, *groups = [f"{shortened(line.replace('29510', port))} {both}" for line in block.splitlines()]
    common = {"cwd": workplace, "env": environment_of(workplace), "text": True}
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
def test_configs_resolve_and_train(file, workplace, tmp_path):
    """Each file as it stands passes every check on its GPUs, and trains with a small model on text that is here."""
    tokenizer = ROOT / "torchtitan_clone" / "data" / "assets" / "stdlib_tokenizer"
    ranks = GPUS.get(file.stem, 8)
    words = [f"--job.config_file={file}", f"--model.hf_assets_path={tokenizer}", f"--job.dump_folder={tmp_path}"]
    code, output = train([*words, "--dry-run"], log_folder=tmp_path, env={"WORLD_SIZE": str(ranks)})
    assert code == 0, output
    assert f"{ranks} ranks" in output
    small = [
        *words, *SMALL, f"--training.dataset_path={workplace / 'my_text'}", "--model.args.n_layers=2",
        "--model.args.vocab_size=2048", "--training.global_batch_size=2", "--compile.backend=aot_eager",
        f"--data.cache_folder={workplace / 'cache'}", "--data.num_workers=0",
        "--parallelism.data_parallel_shard_degree=-1", "--parallelism.tensor_parallel_degree=1",
        "--parallelism.pipeline_parallel_degree=1",
    ]  # fmt: skip
    code, output = train(small, log_folder=tmp_path)
    assert code == 0, output
    assert "training is complete: step 3 of 3" in output
