"""Make a checkpoint that a run resumes from, of one that torchtitan has saved (DCP); nothing in it is unpickled.

    python scripts/convert_from_dcp.py outputs/checkpoint/step-1000 my_import --job.config_file=my_run.toml

    CONFIG_FILE=my_run.toml ./run_train.sh --checkpoint.initial_load_path=my_import \\
        --checkpoint.initial_load_model_only=false

my_run.toml, which may be torchtitan's own file, and options of a run (--table.key=value) say which model and optimizer
the checkpoint is of. Weights, the state of the optimizer, the step and the number of tokens are converted; the position
in the data is not, so that the run reads its data from the beginning. It needs the memory of one tensor.
"""

from torchtitan_clone.commands.foreign import convert
from torchtitan_clone.hub.torchtitan import open_torchtitan


def main(words: list[str]) -> int:
    """Converts what the command line names; returns the exit code."""
    source = "folder with .metadata and .distcp files"
    return convert(words, description=__doc__, source=source, opened=open_torchtitan)
