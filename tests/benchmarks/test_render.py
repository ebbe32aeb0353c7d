"""The tables of docs/benchmarks.md are those of benchmarks/results (benchmarks/render.py)."""

import json
import subprocess

from benchmarks.render import ROOT

PAGE = "# Page\n\nText.\n<!-- table ranks -->\n| old |\n\nMore text.\n"
EXPECTED = """# Page

Text.
<!-- table ranks -->
| processor | date | model | shard | tensor |
| --- | --- | --- | --- | --- |
| small | 2026-11-21 | default | 1.50 (1.40-1.60), 1.20 |  |
| large | 2026-11-23 | default | 2.0 | 1,200 (1-2), 1.10 |

More text.
"""


def render(python, *arguments):
    command = [python, "benchmarks/render.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def write_results(folder, name, *, processor, rows):
    folder.mkdir(exist_ok=True)
    block = {"question": "ranks", "command": "python x.py", "conditions": {"model": "default"}, "rows": "ROWS"}
    file = {"date": name[:10], "processor": processor, "machine": "2 cores", "results": [block]}
    (folder / f"{name}.json").write_text(json.dumps(file).replace('"ROWS"', rows))


def test_the_page_shows_the_results(python):
    done = render(python, "--check")
    assert done.returncode == 0, done.stderr
    pages = [json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")]
    assert pages
    assert all(block["command"] for page in pages for block in page["results"])


def test_the_newest_result_of_a_processor_is_rendered_with_its_digits(python, tmp_path):
    results, page = tmp_path / "results", tmp_path / "page.md"
    write_results(
        results, "2026-11-21-a", processor="small",
        rows='[{"axis": "shard", "ratio": [1.50, 1.40, 1.60], "of_expected": 1.20}]',
    )  # fmt: skip
    write_results(results, "2026-11-22-b", processor="large", rows='[{"axis": "shard", "ratio": 9.9}]')
    write_results(
        results, "2026-11-23-b", processor="large",
        rows='[{"axis": "shard", "ratio": 2.0}, {"axis": "tensor", "ratio": ["1,200", 1, 2], "of_expected": 1.10}]',
    )  # fmt: skip
    page.write_text(PAGE)
    arguments = (f"--page={page}", f"--results={results}")
    checked = render(python, "--check", *arguments)
    assert checked.returncode == 1
    assert f"the tables of {page} are not those of the results" in checked.stderr
    assert page.read_text() == PAGE
    assert render(python, *arguments).returncode == 0
    assert page.read_text() == EXPECTED
    assert render(python, "--check", *arguments).returncode == 0


def test_a_table_without_results_is_an_error(python, tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    done = render(python, f"--page={tmp_path / 'page.md'}", f"--results={tmp_path}")
    assert done.returncode == 1
    assert "no results for the question 'ranks'" in done.stderr
