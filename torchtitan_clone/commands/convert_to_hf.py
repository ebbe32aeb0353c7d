"""Make a folder in the format of the Hugging Face hub from a checkpoint, without a GPU and without other processes.

    python scripts/convert_to_hf.py outputs/my_run/checkpoint/step-1000 my_model --export_dtype=bfloat16

The folder is what checkpoint.last_save_in_hf writes at the end of a run: weights, config.json, generation_config.json
and the tokenizer. It needs the memory of one tensor, and appears complete or not at all.
"""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from torchtitan_clone.checkpoint.offline import Weights
from torchtitan_clone.checkpoint.tensor_file import entry_for, exported_dtype
from torchtitan_clone.commands.parsing import add_tokenizer_options, build_parser
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.hub.export import export_files, write_weights
from torchtitan_clone.hub.formats import format_of
from torchtitan_clone.models import find_model
from torchtitan_clone.observe.outputs import reports_errors
from torchtitan_clone.ops.tensor_slices import assemble_source, sources_of
from torchtitan_clone.run.trained import args_at_step, tokenizer_at_step


def convert(
    checkpoint: Path, folder: Path, *, dtype: torch.dtype, hf_assets_path: str | None, averages: bool = False
) -> None:
    """Reads the checkpoint's own config.toml for the model; ConfigError where something does not fit."""
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; give a folder")
    if inside := [path for path in (Path.cwd(), checkpoint.resolve()) if path.is_relative_to(folder)]:
        raise ConfigError(f"{folder} would be replaced, and {inside[0]} is in it; give a folder of its own")
    weights = Weights(checkpoint, averages=averages)
    config = load_config([f"--job.config_file={checkpoint / 'config.toml'}"])
    config = replace(config, model=replace(config.model, hf_assets_path=hf_assets_path or config.model.hf_assets_path))
    spec, tokenizer = find_model(config.model), tokenizer_at_step(config, weights=weights)
    args = args_at_step(config, weights=weights, spec=spec, tokenizer=tokenizer)
    state, found = spec.state_on_meta(args), weights.meta()
    if absent := [name for name in state if name not in found]:
        raise ConfigError(f"{checkpoint} lacks {', '.join(absent)}")
    sources = sources_of(format_of(spec).map_state(state, args=args))
    # Several tensors of the hub may be made of one of ours.
    read = lru_cache(maxsize=1)(weights.read)
    write_weights(
        folder,
        entries=[
            entry_for(name, dtype=exported_dtype(ours, found[ours].dtype, wanted=dtype), shape=part.shape)
            for name, ((ours, part), *_) in sources.items()
        ],
        read=lambda entry: assemble_source(sources[entry.name], read=read, dtype=entry.torch_dtype),
        files=export_files(spec=spec, model_args=args, tokenizer=tokenizer, dtype=dtype),
    )


@reports_errors
def main(words: list[str]) -> int:
    """Parses the command line, converts, and prints where the result is; returns the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("checkpoint", type=Path, help="a step-N folder")
    parser.add_argument("folder", type=Path, help="folder to write; an export in it is replaced")
    parser.add_argument("--export_dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--ema", action="store_true", help="of the moving averages of the weights (ema.enable)")
    add_tokenizer_options(parser)
    options = parser.parse_args(words)
    assets, dtype = options.hf_assets_path, getattr(torch, options.export_dtype)
    convert(options.checkpoint, options.folder, dtype=dtype, hf_assets_path=assets, averages=options.ema)
    print(f"wrote {options.folder}")
    return 0
