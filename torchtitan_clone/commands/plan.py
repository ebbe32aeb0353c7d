"""Searches the fastest mesh for a model on a number of GPUs, and predicts its memory and speed; needs no GPU.

    python scripts/plan.py llama3_70b --gpus=64 --hardware=h100 --tokens-per-step=4M
    python scripts/plan.py my_run.toml --gpus=4 --hardware=my_machine.toml

The file gives the model, the sequence length, compilation and all else that is not searched; options of the run
(--table.key=value) override it. The search covers all degrees of parallelism, micro-batch, schedule, recomputation and
resharding. Prints the ten fastest that fit, with their lines of TOML, and the mesh of the file if it suits the GPUs.
"""

import argparse

from torchtitan_clone.commands.parsing import build_parser
from torchtitan_clone.config.environment import MAX_WORLD_SIZE
from torchtitan_clone.observe.outputs import reports_errors
from torchtitan_clone.planner.hardware import read_hardware
from torchtitan_clone.planner.search import describe_plans

UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def count_tokens(text: str) -> int:
    """Returns a number such as 4194304 or 4M, of 2^20."""
    number, unit = (text[:-1], UNITS[text[-1]]) if text[-1:] in UNITS else (text, 1)
    if not number.isdecimal() or not int(number):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, with K, M or G for powers of 1,024")
    return int(number) * unit


@reports_errors
def main(words: list[str]) -> int:
    """Parses the command line and prints the plans; returns the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("config", help="TOML file of the run, or the name of one in train_configs/")
    parser.add_argument("--gpus", type=count_tokens, required=True, help="number of devices")
    parser.add_argument("--hardware", default="h100", help="name of a table, or the path of one")
    parser.add_argument("--tokens-per-step", type=count_tokens, help="tokens of a global batch; default: the file's")
    parser.add_argument("--count", type=count_tokens, default=10, help="number of meshes to print")
    options, words = parser.parse_known_args(words)
    if options.gpus > MAX_WORLD_SIZE:
        parser.error(f"--gpus={options.gpus}: at most {MAX_WORLD_SIZE:,} are planned for")
    argv = [f"--job.config_file={options.config}", *words]
    tokens, hardware = options.tokens_per_step, read_hardware(options.hardware)
    print(describe_plans(argv, gpus=options.gpus, hardware=hardware, tokens=tokens, count=options.count), end="")
    return 0
