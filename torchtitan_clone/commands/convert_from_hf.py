"""Make a checkpoint that a run can start from, of a folder in the format of the Hugging Face hub.

    python scripts/convert_from_hf.py my_llama my_seed

    CONFIG_FILE=my_seed/model.toml ./run_train.sh --checkpoint.initial_load_path=my_seed

my_seed/model.toml has the [model] table that the weights ask for; a file of your own can name it in job.extends. It
needs the memory of one tensor. A run can also read the folder itself, see checkpoint.initial_load_in_hf.
"""

import sys
from pathlib import Path

import torch

from torchtitan_clone.checkpoint.offline import write_weights_checkpoint
from torchtitan_clone.checkpoint.tensor_file import exported_dtype
from torchtitan_clone.commands.parsing import build_parser
from torchtitan_clone.config import Config, ConfigError, to_toml
from torchtitan_clone.config.messages import toml_like
from torchtitan_clone.config.schema_training import Model
from torchtitan_clone.files import write_atomically
from torchtitan_clone.hub.folder import open_weight_folder
from torchtitan_clone.hub.weights import model_of_folder, open_initial_weights
from torchtitan_clone.models import find_model
from torchtitan_clone.models.spec import ModelSpec
from torchtitan_clone.observe.outputs import reports_errors


def convert(source: Path, folder: Path, *, spec: ModelSpec, dtype: torch.dtype) -> Model:
    """Writes folder/step-0; returns the model with the arguments of the folder's config.json."""
    model = model_of_folder(open_weight_folder(source), spec=spec)
    args = spec.resolve_args(model)
    if problems := args.violations():
        raise ConfigError(problems)
    state = {
        name: tensor.detach().to(exported_dtype(name, tensor.dtype, wanted=dtype))
        for name, tensor in spec.state_on_meta(args).items()
    }
    weights = open_initial_weights(source, spec=spec, model_args=args, state=state)
    for warning in weights.warnings:
        print(f"warning: {warning}", file=sys.stderr)

    def read(name: str) -> torch.Tensor:
        complete = torch.empty_like(state[name], device="cpu")
        weights.fill({name: complete})
        return complete

    extra_files = {"config.toml": to_toml(Config(model=model))}
    write_weights_checkpoint(folder / "step-0", meta=state, read=read, extra_files=extra_files)
    return model


def model_table(model: Model) -> str:
    """The [model] table of a TOML file."""
    values = {key: value for key, value in vars(model).items() if value is not None}
    return "\n".join(["[model]", *(f"{key} = {toml_like(value)}" for key, value in values.items())]) + "\n"


@reports_errors
def main(words: list[str]) -> int:
    """Parses the command line, converts, and prints how to start training; returns the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("source", type=Path, help="folder with .safetensors files and config.json")
    parser.add_argument("folder", type=Path, help="folder to write step-0 and model.toml into")
    parser.add_argument("--model", default="llama3", help="as model.name")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="as training.dtype")
    options = parser.parse_args(words)
    spec = find_model(Model(name=options.model))
    model = convert(options.source, options.folder, spec=spec, dtype=getattr(torch, options.dtype))
    write_atomically(options.folder / "model.toml", model_table(model).encode())
    print(f"wrote {options.folder / 'step-0'} and {options.folder / 'model.toml'}")
    return 0
