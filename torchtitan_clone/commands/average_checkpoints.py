"""Average the weights of checkpoints: one that a run can start from.

    python scripts/average_checkpoints.py outputs/my_run/checkpoint my_average --last=5
    python scripts/average_checkpoints.py my_run/checkpoint/step-900 my_run/checkpoint/step-1000 my_average

    ./run_train.sh --checkpoint.initial_load_path=my_average

Each tensor is summed in fp64 in the order of the steps and rounded once: the result has the same bits whatever meshes
wrote the checkpoints. Buffers, such as the biases of routers, are those of the last step. It needs the memory of one
tensor in fp64, and my_average/step-0 appears complete or not at all.
"""

import json
from pathlib import Path

import torch

from torchtitan_clone.checkpoint.folder import CONFIG_FILE, MANIFEST_FILE, committed_steps, is_complete, step_folder
from torchtitan_clone.checkpoint.offline import Weights, check_alike, mean_of, write_weights_checkpoint
from torchtitan_clone.commands.parsing import build_parser
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.models import find_model
from torchtitan_clone.observe.outputs import reports_errors


def find_steps(sources: list[Path], *, last: int | None) -> list[Path]:
    """Returns the folders of steps to average; ConfigError if they are fewer than two, or not all complete."""
    if len(sources) == 1 and not (sources[0] / MANIFEST_FILE).exists():
        steps = [step for step in committed_steps(sources[0]) if is_complete(sources[0], step=step)]
        if len(steps) < (wanted := last or 5):
            raise ConfigError(f"{sources[0]} has {len(steps)} complete checkpoints, not {wanted}; lower --last")
        sources = [step_folder(sources[0], step) for step in steps[-wanted:]]
    elif last is not None:
        raise ConfigError(f"--last={last}: is for one folder that contains step-N folders; leave it out")
    if len({source.resolve() for source in sources}) < max(2, len(sources)):
        raise ConfigError("an average is that of two checkpoints or more, each named once")
    return sources


def average(sources: list[Path], folder: Path, *, of_averages: bool) -> list[int]:
    """Writes folder/step-0, and returns the steps that it is the average of."""
    weights = sorted((Weights(source, averages=of_averages) for source in sources), key=lambda each: each.progress.step)
    check_alike(weights)
    newest = weights[-1]
    model = load_config([f"--job.config_file={newest.folder / CONFIG_FILE}"]).model
    spec = find_model(model)
    state = spec.state_on_meta(spec.resolve_args(model))

    def read(name: str) -> torch.Tensor:
        is_weight = isinstance(state.get(name), torch.nn.Parameter)
        return mean_of(weights, name) if is_weight else newest.read(name)

    extra_files = {CONFIG_FILE: (newest.folder / CONFIG_FILE).read_text()}
    extra_files["average.json"] = json.dumps([str(each.folder) for each in weights], indent=1)
    write_weights_checkpoint(folder / "step-0", meta=newest.meta(), read=read, extra_files=extra_files)
    return [each.progress.step for each in weights]


@reports_errors
def main(words: list[str]) -> int:
    """Parses the command line, averages, and prints of which steps; returns the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("sources", type=Path, nargs="+", help="step-N folders, or one folder that contains them")
    parser.add_argument("folder", type=Path, help="folder to write step-0 into")
    parser.add_argument("--last", type=int, help="number of newest steps of one folder of them (default: 5)")
    parser.add_argument("--ema", action="store_true", help="average the moving averages of the weights (ema.enable)")
    options = parser.parse_args(words)
    if options.last is not None and options.last < 2:
        parser.error(f"--last={options.last}: must be at least 2")
    steps = average(find_steps(options.sources, last=options.last), options.folder, of_averages=options.ema)
    print(f"wrote {options.folder / 'step-0'}, the average of steps {', '.join(map(str, steps))}")
    return 0
