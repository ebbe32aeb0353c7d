"""Writes a report of one or several runs as one HTML page, which opens without a network.

    python scripts/report.py outputs/debug_model
    python scripts/report.py outputs/debug_model outputs/lower_lr --output=compared.html
    python scripts/report.py outputs/debug_model --serve

Reads the run folders only, also of runs that are under way, and copies of them.
"""

from pathlib import Path

from torchtitan_clone.commands.parsing import build_parser
from torchtitan_clone.files import format_bytes, write_atomically
from torchtitan_clone.observe.outputs import reports_errors
from torchtitan_clone.tools.report import build_report
from torchtitan_clone.tools.report_server import serve


@reports_errors
def main(words: list[str]) -> int:
    """Parses the command line and writes or serves the page; returns the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="folder of a run")
    parser.add_argument("--output", type=Path, help="file to write (report.html in the first folder)")
    parser.add_argument("--serve", action="store_true", help="serve the page to this machine, and refresh it")
    parser.add_argument("--port", type=int, default=8080, help="port of --serve (8080); 0 picks a free one")
    options = parser.parse_args(words)
    if not 0 <= options.port < 2**16:
        parser.error(f"--port={options.port}: must be from 0 to {2**16 - 1}")
    output = options.output or options.folders[0] / "report.html"
    if options.serve:
        return serve(options.folders, port=options.port)
    write_atomically(output, build_report(options.folders).encode())
    print(f"{output}: {format_bytes(output.stat().st_size)}")
    return 0
