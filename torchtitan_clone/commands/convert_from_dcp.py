"""Make a checkpoint that a run resumes from, of one that torchtitan has saved (DCP); nothing in it is unpickled.

    python scripts/convert_from_dcp.py outputs/checkpoint/step-1000 my_import --job.config_file=my_run.toml

    CONFIG_FILE=my_run.toml ./run_train.sh --checkpoint.initial_load_path=my_import \\
        --checkpoint.initial_load_model_only=false

my_run.toml, which may be torchtitan's own file, and options of a run (--table.key=value) say which model and optimizer
the checkpoint is of. Weights, the state of the optimizer, the step and the number of tokens are converted; the position
in the data is not, so that the run reads its data from the beginning. It needs the memory of one tensor.
"""

import sys
from pathlib import Path

from torchtitan_clone.checkpoint.folder import CONFIG_FILE, step_folder
from torchtitan_clone.checkpoint.offline import write_checkpoint
from torchtitan_clone.commands.parsing import build_parser
from torchtitan_clone.config import load_config, to_toml
from torchtitan_clone.hub.torchtitan import open_torchtitan
from torchtitan_clone.observe.outputs import reports_errors


@reports_errors
def main(words: list[str]) -> int:
    """Parses the command line, converts, and prints what was converted; returns the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("source", type=Path, help="folder with .metadata and .distcp files")
    parser.add_argument("folder", type=Path, help="folder to write step-N into")
    parser.add_argument("--model_only", action="store_true", help="convert only weights, to step 0")
    options, words = parser.parse_known_args(words)
    config = load_config(words)
    found = open_torchtitan(options.source, config=config, model_only=options.model_only)
    for warning in found.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    folder = step_folder(options.folder, found.progress.step)
    write_checkpoint(
        folder, meta=found.meta, read=found.read, extra_files={CONFIG_FILE: to_toml(config)}, progress=found.progress
    )
    what = f"{len(found.meta)} tensors, {found.progress.tokens_seen:,} tokens seen"
    print(f"wrote {folder}: {what}; the position in the data is not converted")
    return 0
