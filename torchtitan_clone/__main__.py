"""`python -m torchtitan_clone COMMAND`: the same as the command `torchtitan_clone`."""

import sys

from torchtitan_clone.commands import main

if __name__ == "__main__":
    sys.exit(main())
