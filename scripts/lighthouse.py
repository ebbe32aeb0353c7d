"""Runs the lighthouse, at which the replica groups of a run meet; takes the same options as the run.

    python scripts/lighthouse.py --job.config_file=FILE --fault_tolerance.min_replica_size=1

Prints the address that the replica groups need in $TORCHFT_LIGHTHOUSE. One process for all groups, on any machine that
they reach. It holds no state: if it dies, training stands still until it is started again at the same address.
--port=N chooses the port (29510).
"""

import sys
import threading

from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.fault_tolerance.lighthouse import start_lighthouse


def main(argv: list[str]) -> int:
    """Serves until it is killed."""
    ports = [argument for argument in argv if argument.startswith("--port=")]
    port = int(ports[-1].removeprefix("--port=")) if ports else 29510
    try:
        config = load_config([argument for argument in argv if argument not in ports])
        lighthouse = start_lighthouse(config.fault_tolerance, port=port)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    print(f"TORCHFT_LIGHTHOUSE={lighthouse.address()}", flush=True)
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
