"""Print how fast the activations of a model grow with its width, after each of five steps: the coordinate check of muP.

    python scripts/coord_check.py --model.args.dim=64 --model.args.n_heads=4 --model.args.mup_base_dim=64

Trains models of 1, 2, 4 and 8 times the width of the configuration, with as many times the heads, on one batch of
random tokens. The table has the slope of the logarithm of the root mean square over that of the width: about 0 with
muP, while results grow without. The options are those of a run.
"""

import torch

from torchtitan_clone.commands.parsing import build_parser
from torchtitan_clone.config import load_config
from torchtitan_clone.observe.outputs import reports_errors
from torchtitan_clone.parallel.runtime import Launch, process_group
from torchtitan_clone.tools.width_check import slopes


@reports_errors
def main(words: list[str]) -> int:
    """Parses the command line, measures and prints a table; returns the exit code."""
    _, words = build_parser(__doc__).parse_known_args(words)
    config = load_config(words)
    with process_group(config.comm, launch=Launch.from_environment(), device=torch.device("cpu")):
        found = slopes(config)
    print(f"{'slope after step':<20}" + "".join(f"{step:>8}" for step in range(len(found))))
    for name in found[0]:
        print(f"{name:<20}" + "".join(f"{each[name]:>+8.3f}" for each in found))
    return 0
