"""What a complete run says at its end: where its results are, and the commands that go on from them."""

import os
import shlex
import shutil
import sys
from pathlib import Path

from torchtitan_clone.checkpoint.folder import step_folder
from torchtitan_clone.config import Config
from torchtitan_clone.config.resolved import EXPORT_FOLDER
from torchtitan_clone.documents import escape
from torchtitan_clone.observe.metrics import METRICS_FILE
from torchtitan_clone.optim import build_schedule
from torchtitan_clone.run.plan import RunPlan

SCRIPTS = Path(__file__).parents[2] / "scripts"
JUMP = 1.1
"""A change of the learning rate by more than this factor is worth a line."""


def describe_results(plan: RunPlan) -> list[str]:
    """Returns where the results of a complete run are, and the commands that go on from them, one a line."""
    config, folder, step = plan.config, plan.folder, plan.config.training.steps
    saves = config.checkpoint.enable and not config.checkpoint.load_only
    exports = config.checkpoint.last_save_in_hf
    export, checkpoint = folder / EXPORT_FOLDER / f"step-{step}", step_folder(plan.checkpoint_folder, step)
    events = plan.output_folder / config.metrics.save_tb_folder
    lines = {
        "metrics": f"{plan.output_folder / METRICS_FILE}",
        "TensorBoard": _command("-m", "tensorboard.main", "--logdir", events)
        if config.metrics.enable_tensorboard
        else "",
        "report": _command(_script("report.py"), folder),
        "checkpoint": f"{checkpoint}" if saves else "",
        "weights": f"{export}" if exports else "",
        "export": _command(_script("convert_to_hf.py"), checkpoint, "FOLDER") if saves and not exports else "",
        "generate": f'{_command(_script("generate.py"), folder if saves else export)} --prompt="..."'
        if saves or exports
        else "",
        "extend": f"rerun the same command with {describe_extension(config)}" if saves else "",
    }
    return [f"{name:<13}{escape(text)}" for name, text in lines.items() if text]


def describe_extension(config: Config) -> str:
    """Returns the option with which a complete run goes on, and how the learning rate would jump."""
    steps, lr = config.training.steps, config.optimizer.lr
    option = f"--training.steps={2 * steps}"
    last = lr * build_schedule(config.lr_scheduler, steps=steps)(steps)
    following = lr * build_schedule(config.lr_scheduler, steps=2 * steps)(steps + 1)
    if following <= JUMP * last:
        return option
    remedy = f"add --lr_scheduler.total_steps={steps} to keep the final rate"
    return (
        f"{option}: the learning rate would jump from {last:.2e} to {following:.2e}, because the schedule ends with "
        f"training.steps; {remedy}"
    )


def _script(name: str) -> str:
    """Returns the path of a script, relative to the working directory if it is in there."""
    return _shortened(SCRIPTS / name)


def _command(*arguments: str | Path) -> str:
    """Returns a command of the Python that runs this, which a shell finds as "python" in an active environment only."""
    found = shutil.which("python")
    is_active = found is not None and Path(found).parent == Path(sys.executable).parent
    return shlex.join(["python" if is_active else _shortened(Path(sys.executable)), *map(str, arguments)])


def _shortened(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
