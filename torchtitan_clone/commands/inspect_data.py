"""Shows what a run trains on, from its folder or its options, without starting it.

    python scripts/inspect_data.py documents --training.dataset_path=my_text
    python scripts/inspect_data.py rows --folder=outputs/debug_model --step=3 --row=0 --row=5
    python scripts/inspect_data.py plan --job.config_file=my_mixture.toml --training.global_batch_size=64

`rows` prints the text of rows of a global batch (without --row, of all), `documents` the lengths of the documents,
`plan` the tokens and epochs of each source in each stage of a mixture.
"""

from pathlib import Path

from torchtitan_clone.commands.parsing import build_parser
from torchtitan_clone.observe.outputs import reports_errors
from torchtitan_clone.tools.inspection import inspect_run


@reports_errors
def main(words: list[str]) -> int:
    """Parses the command line and prints; returns the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("action", choices=["rows", "documents", "plan"])
    parser.add_argument("--folder", type=Path, help="folder of a run, which has config.toml")
    parser.add_argument("--step", type=int, default=1, help="rows: the optimizer step, from 1")
    parser.add_argument("--row", type=int, action="append", default=[], help="rows: index in the global batch, from 0")
    options, words = parser.parse_known_args(words)
    run = inspect_run(options.folder, words=words)
    tables = {"documents": run.describe_documents, "plan": run.describe_plan}
    table = tables.get(options.action, lambda: run.describe_rows(options.step, rows=options.row))
    for line in table():
        print(line)
    return 0
