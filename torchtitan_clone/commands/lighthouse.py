"""Runs the lighthouse through which the replica groups of a run find each other; takes the options of the run.

    python scripts/lighthouse.py --job.config_file=FILE --fault_tolerance.min_replica_size=1

Prints the address that the replica groups need in $TORCHFT_LIGHTHOUSE. Start one process for all groups; if they are on
several machines, with --bind=ADDRESS of this machine in their network. It holds no state: if it dies, training waits
until it is started again at the same address.
"""

import signal

from torchtitan_clone.commands.parsing import build_parser
from torchtitan_clone.config import ConfigError, load_run_config
from torchtitan_clone.config.checks import find_range_errors
from torchtitan_clone.network import LOOPBACK
from torchtitan_clone.observe.outputs import reports_errors
from torchtitan_clone.torchft.lighthouse import start_lighthouse


@reports_errors
def main(words: list[str]) -> int:
    """Serves until it is interrupted with Ctrl-C or killed."""
    parser = build_parser(__doc__)
    parser.add_argument("--port", type=int, default=29510, help="port to listen on (29510); 0 picks a free one")
    parser.add_argument(
        "--bind",
        default=LOOPBACK,
        help="address of this machine to listen at (127.0.0.1, which only this machine can reach); where groups run on "
        "several machines, its address in their private network: who reaches the lighthouse can disturb the run",
    )
    own, options = parser.parse_known_args(words)
    config = load_run_config(options)
    if errors := [*find_range_errors(config, at="")]:
        raise ConfigError(errors)
    lighthouse = start_lighthouse(config.fault_tolerance, port=own.port, bind=own.bind)
    print(f"TORCHFT_LIGHTHOUSE={lighthouse.url}", flush=True)
    while True:
        signal.pause()
