"""Make a checkpoint that a run resumes from, of a ckpt.pt of nanoGPT; nothing in it is unpickled.

    python scripts/convert_from_nanogpt.py out/ckpt.pt my_import --job.config_file=my_run.toml

    CONFIG_FILE=my_run.toml ./run_train.sh --checkpoint.initial_load_path=my_import \\
        --checkpoint.initial_load_model_only=false

my_run.toml and options of a run (--table.key=value) say which model of the family gpt2, and which optimizer the
checkpoint is of. Weights, the state of AdamW, the step and the number of tokens are converted; the position in the data
is not, so that the run reads its data from the beginning. It needs the memory of one tensor.
"""

from torchtitan_clone.commands.foreign import convert
from torchtitan_clone.hub.nanogpt import open_nanogpt


def main(words: list[str]) -> int:
    """Converts what the command line names; returns the exit code."""
    return convert(words, description=__doc__, source="file that nanoGPT has saved", opened=open_nanogpt)
