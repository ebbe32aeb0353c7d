"""What the commands that convert checkpoints of other trainers have in common."""

import sys
from collections.abc import Callable
from pathlib import Path

from torchtitan_clone.checkpoint.folder import CONFIG_FILE, step_folder
from torchtitan_clone.checkpoint.offline import write_checkpoint
from torchtitan_clone.commands.parsing import build_parser
from torchtitan_clone.config import load_config, to_toml
from torchtitan_clone.hub.foreign import ForeignCheckpoint
from torchtitan_clone.observe.outputs import reports_errors


@reports_errors
def convert(words: list[str], *, description: str | None, source: str, opened: Callable[..., ForeignCheckpoint]) -> int:
    """Parses the command line, converts, and prints what was converted; returns the exit code.

    `opened` opens the source, which `source` describes.
    """
    parser = build_parser(description)
    parser.add_argument("source", type=Path, help=source)
    parser.add_argument("folder", type=Path, help="folder to write step-N into")
    parser.add_argument("--model_only", action="store_true", help="convert only weights, to step 0")
    options, words = parser.parse_known_args(words)
    config = load_config(words)
    found = opened(options.source, config=config, model_only=options.model_only)
    for warning in found.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    folder = step_folder(options.folder, found.progress.step)
    write_checkpoint(
        folder, meta=found.meta, read=found.read, extra_files={CONFIG_FILE: to_toml(config)}, progress=found.progress
    )
    what = f"{len(found.meta)} tensors, {found.progress.tokens_seen:,} tokens seen"
    print(f"wrote {folder}: {what}; the position in the data is not converted")
    return 0
