"""Writes a run as a task of SkyPilot, with the same options as run_train.sh and those of [launch].

    python scripts/launch/skypilot.py --job.config_file=FILE --launch.nodes=2 --launch.accelerator=H100 --dry-run
    python scripts/launch/skypilot.py --job.config_file=FILE --output=my_task.yaml

--dry-run prints the task. Without it the task is written to --output, by default skypilot.yaml, for `sky jobs launch`.
"""

from pathlib import Path

from torchtitan_clone.commands.manifests import check_for_containers, write_yaml
from torchtitan_clone.commands.parsing import build_parser
from torchtitan_clone.config import load_run_config
from torchtitan_clone.config.started import DEFAULT_CONFIG
from torchtitan_clone.launch.skypilot import task
from torchtitan_clone.observe.outputs import reports_errors


@reports_errors
def main(words: list[str]) -> int:
    """Prints or writes the task; returns exit code 2 for an invalid configuration."""
    parser = build_parser(__doc__)
    parser.add_argument("--output", type=Path, default=Path("skypilot.yaml"), help="file to write")
    options, words = parser.parse_known_args(words)
    config = load_run_config(words, default=str(DEFAULT_CONFIG))
    check_for_containers(config)
    secrets = "".join(f" --secret {name}" for name in config.launch.secrets)
    write_yaml([task(config)], file=options.output, command=f"sky jobs launch{secrets}", prints=config.job.dry_run)
    return 0
