"""How the user starts this package: by the scripts of a checkout, or by the command `torchtitan_clone`.

Messages name what exists there. Their text, which names scripts, goes through `as_started`.
"""

import os
import re
from pathlib import Path

VARIABLE = "TORCHTITAN_CLONE_COMMAND"
"""The command `torchtitan_clone` sets this environment variable, which the processes that it starts inherit."""
CHECKOUT = Path(__file__).parents[2]
SCRIPTS = {
    "train": "run_train.sh",
    "plan": "scripts/plan.py",
    "report": "scripts/report.py",
    "generate": "scripts/generate.py",
    "evaluate": "scripts/evaluate.py",
    "prepare": "scripts/prepare_data.py",
    "predict": "scripts/store_predictions.py",
    "inspect": "scripts/inspect_data.py",
    "checkpoint": "scripts/checkpoint.py",
    "convert from_hf": "scripts/convert_from_hf.py",
    "convert to_hf": "scripts/convert_to_hf.py",
    "convert from_dcp": "scripts/convert_from_dcp.py",
    "convert from_nanogpt": "scripts/convert_from_nanogpt.py",
    "serve_check": "scripts/serve_check.py",
    "convert tokenizer": "scripts/convert_tokenizer.py",
    "average": "scripts/average_checkpoints.py",
    "tokenizer": "scripts/train_tokenizer.py",
    "lighthouse": "scripts/lighthouse.py",
    "measure": "scripts/measure_hardware.py",
    "coord_check": "scripts/coord_check.py",
    "submit": "scripts/slurm/submit.py",
    "kubernetes": "scripts/launch/kubernetes.py",
    "skypilot": "scripts/launch/skypilot.py",
}
"""The script of a checkout that does what each command of `torchtitan_clone` does."""


_INSTALLED_CONFIGS = Path(__file__).parents[1] / "train_configs"
CONFIGS = _INSTALLED_CONFIGS if _INSTALLED_CONFIGS.is_dir() else CHECKOUT / "train_configs"
"""The configuration files: of the checkout, or the copy that a wheel has in the package."""
DEFAULT_CONFIG = CONFIGS / "debug_model.toml"


def shipped_configs() -> list[str]:
    """Returns the names of the files in train_configs/."""
    return sorted(path.stem for path in CONFIGS.glob("*.toml"))


def find_config(name: str, *, folder: Path = Path()) -> str:
    """Returns the path of a file in a folder or, where it has none, of the one of train_configs/ with this name."""
    is_shipped = name in shipped_configs() and not (folder / name).exists()
    return str(CONFIGS / f"{name}.toml" if is_shipped else folder / name)


def uses_checkout() -> bool:
    """Whether the scripts of a checkout exist, and the user did not start with the command."""
    return VARIABLE not in os.environ and (CHECKOUT / SCRIPTS["train"]).exists()


def reinstall() -> str:
    """Returns what to do where a package that is always needed is missing."""
    if uses_checkout():
        return "start with ./run_train.sh, which sets up an environment, or run pip install -e ."
    return "install torchtitan_clone with its requirements: pip install --force-reinstall, of the file it came from"


def as_started(text: str) -> str:
    """Returns a text that names scripts of a checkout, with the commands in their place where those are used."""
    if uses_checkout():
        return text
    names = {script: f"torchtitan_clone {name}" for name, script in SCRIPTS.items()}
    pattern = rf"(torchrun (?:--\S+ )*)?(?:python |\./)?\b({'|'.join(map(re.escape, names))})\b"
    return re.sub(pattern, lambda found: (f"{found[1]}-m " if found[1] else "") + names[found[2]], text)
