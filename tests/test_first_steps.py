"""What a new user types into a fresh clone works, or is answered before torch is imported where torch is not needed.

Each step prints its processor time, which decides nothing: `pytest -s -m documentation tests/test_first_steps.py`.
"""

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.marks import needs_door

pytestmark = pytest.mark.documentation
ROOT = Path(__file__).parents[1]
SMALL = "--job.config_file=small.toml"
FILES = {
    "small.toml": '[job]\nrun_name = "small"\n[training]\nsteps = 2\nseq_len = 64\nlocal_batch_size = 2\n'
    'mixed_precision_param = "float32"\n[lr_scheduler]\nwarmup_steps = 1\n[metrics]\nlog_freq = 1\n'
    "[model.args]\nn_layers = 1\ndim = 32\nn_heads = 2\nn_kv_heads = 2\nmultiple_of = 8\n",
    "malformed.toml": "[training]\nsteps 10\n",
    "titan.toml": "[job]\nprint_config = true\nuse_for_integration_test = true\n[experimental]\ncustom_import = ''\n"
    '[parallelism]\nexpert_parallel_comm_backend = "standard"\n',
    "mine.py": "import sys\nfrom torchtitan_clone.models import MODELS\n"
    "from torchtitan_clone.train import exit_process\n"
    'MODELS["mine"] = MODELS["llama3"]\nexit_process(sys.argv[1:])\n',
    "story.txt": "Once upon a time a model was trained.\n" * 2000,
}


class Step(NamedTuple):
    """A line that a user types, and what is printed."""

    line: str
    printed: str
    code: int = 0
    needs_torch: bool = False
    """Whether the step may import torch: it trains, or looks at the model, the tokenizer or the data."""


STEPS = {
    "help": Step("./run_train.sh --help", "--training.steps  (an integer from 1 to "),
    "help on several ranks": Step("NGPU=8 ./run_train.sh --help checkpoint", "--checkpoint.interval"),
    "optimizer in another case": Step("./run_train.sh --optimizer.name=adamw", 'did you mean "AdamW"?', 2),
    "flavor in another case": Step("./run_train.sh --model.flavor=8b", 'did you mean "8B"?', 2),
    "flavor on ranks": Step("NGPU=4 ./run_train.sh --model.flavor=8b", 'did you mean "8B"?', 2),
    "unknown model": Step("./run_train.sh --model.name=rwkv", "known: apertus, deepseek_v3", 2),
    "pipeline schedule": Step("./run_train.sh --parallelism.pipeline_parallel_schedule=1f1b", '"1F1B"?', 2),
    "config": Step("./run_train.sh --config small.toml", "did you mean job.config_file?", 2),
    "a file": Step("./run_train.sh small.toml --dry-run", "n_layers = 1", needs_torch=True),
    "a file after an option": Step(
        "./run_train.sh --dry-run small.toml", "did you mean --job.config_file=small.toml?", 2
    ),
    "a name": Step("./run_train.sh llama3_8b --optimizer.lr=-1", "must be above 0", 2),
    "a name with a typo": Step("CONFIG_FILE=llama3_8 ./run_train.sh", "did you mean llama3_8b?", 2),
    "former name": Step("./run_train.sh --training.compile", "did you mean compile.enable?", 2),
    "malformed file": Step("CONFIG_FILE=malformed.toml ./run_train.sh", "    steps 10\n          ^\n", 2),
    "a value out of range": Step("./run_train.sh --optimizer.lr=-1", "must be above 0", 2),
    "torchtitan's program": Step("TRAIN_FILE=torchtitan.train ./run_train.sh", "belongs to torchtitan", 2),
    "local tensors": Step("COMM_MODE=local_tensor ./run_train.sh", "COMM_MODE = local_tensor: is not supported", 2),
    "custom import": Step("./run_train.sh --experimental.custom_import=mine", "set job.imports = ", 2),
    "own program": Step(
        f"TRAIN_FILE=mine ./run_train.sh {SMALL} --model.name=mine --dry-run", 'name = "mine"', needs_torch=True
    ),
    "fake backend": Step(
        f"NGPU=32 COMM_MODE=fake_backend ./run_train.sh {SMALL} --training.global_batch_size=64",
        "collectives of rank 0",
        needs_torch=True,
    ),
    "switch": Step(
        f"./run_train.sh {SMALL} --compile.no-enable --dry-run", "memory of a rank  about", needs_torch=True
    ),
    "implausible values": Step(
        "./run_train.sh --dry-run --optimizer.lr=3 --training.local_batch_size=1000000",
        "optimizer.lr = 3: Adam changes a weight by about the learning rate",
        needs_torch=True,
    ),
    "torchtitan's file": Step(
        "CONFIG_FILE=titan.toml ./run_train.sh --dry-run",
        "ignored: job.print_config, job.use_for_integration_test, experimental.custom_import, "
        "parallelism.expert_parallel_comm_backend\n",
        needs_torch=True,
    ),
    "without a file": Step("python -m torchtitan_clone.train --dry-run", "steps = 120\n", needs_torch=True),
    "argument of the model": Step(
        "./run_train.sh --model.args.n_layer=3", "did you mean model.args.n_layers?", 2, needs_torch=True
    ),
    "one text file": Step(
        f"./run_train.sh {SMALL} --training.dataset_path=story.txt --validation.enable", "FLOP/s", needs_torch=True
    ),
    "report": Step("python scripts/report.py outputs/small", "report.html: ", needs_torch=True),
}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of what a clone has, with the files of a user."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("scripts", "torchtitan_clone", "train_configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "run_train.sh", folder)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


PREDICTS = ("fake backend", "switch")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[needs_door("planner")] * (name in PREDICTS)) for name in STEPS]
)
def test_a_step_works_or_is_answered_before_torch_is_imported(name: str, clone: Path) -> None:
    step = STEPS[name]
    cleared = {"PYTHONPATH", "CONFIG_FILE", "COMM_MODE", "TRAIN_FILE", "RANK", "WORLD_SIZE"}
    environment = {key: value for key, value in os.environ.items() if key not in cleared} | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "NO_SETUP": "1",
        "NGPU": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "XDG_CACHE_HOME": str(clone / "cache"),
        "PYTHONPROFILEIMPORTTIME": "1",
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = subprocess.run(
        step.line, shell=True, cwd=clone, env=environment, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    text = answer.stdout + re.sub(r"^import time:.*\n", "", answer.stderr, flags=re.MULTILINE)
    imported = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines() if "import time:" in line}
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"\n{seconds:6.2f} s of processor time{', with torch' if 'torch' in imported else ''}: {step.line}")
    assert step.printed in text
    assert (answer.returncode, "Traceback" in text) == (step.code, False)
    assert step.needs_torch or "torch" not in imported
    if step.code:
        assert len(text.splitlines()) <= 3
