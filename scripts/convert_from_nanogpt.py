"""`torchtitan_clone convert from_nanogpt` of this checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone without being installed

from torchtitan_clone.commands import run_script

if __name__ == "__main__":
    sys.exit(run_script(__file__))
