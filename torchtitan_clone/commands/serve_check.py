"""Check that engines serve a folder in the format of the Hugging Face hub as it was trained.

    python scripts/serve_check.py outputs/my_run/hf/step-1000

transformers, and vLLM where it is installed, load the folder by themselves: logits of the prompts and the tokens that
follow them must be those of this package. Each line says what was compared, and "ok" or what differs.
"""

from pathlib import Path

from torchtitan_clone.commands.parsing import build_parser
from torchtitan_clone.observe.outputs import reports_errors
from torchtitan_clone.tools.serving import check_folder


@reports_errors
def main(words: list[str]) -> int:
    """Parses the command line, and prints the checks; returns 1 if something differs."""
    parser = build_parser(__doc__)
    parser.add_argument("folder", type=Path, help="an export, or a download from the Hugging Face hub")
    parser.add_argument("--prompt", action="append", help="text to continue; may be given several times")
    parser.add_argument("--max_new_tokens", type=int, default=16)
    options = parser.parse_args(words)
    prompts = options.prompt or ["import os\n", "The capital of France is"]
    differs = False
    for check in check_folder(options.folder, prompts=prompts, max_new_tokens=options.max_new_tokens):
        print(check.describe(), flush=True)
        differs = differs or bool(check.problems)
    return int(differs)
