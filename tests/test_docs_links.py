"""Links, numbers and file names that the documentation states are right."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import golden, regress
from tests import test_code_shape as shape
from tests.campaigns import fault_kinds
from tests.support.parity_matrix import QUICK, all_cases
from tests.support.sabotage import MISTAKES
from torchtitan_clone.config import reader as config_sources
from torchtitan_clone.data import kinds, sources

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
SOURCE_FILE = re.compile(r"`([\w.]+/[\w./]+\.(?:py|sh|toml))`")
STEP_FILE = re.compile(r"\| `torchtitan_clone/([\w/]+\.py)` \| (\d+) \|")
DECISIONS = sorted(path for path in (ROOT / "docs" / "decisions").glob("*.md") if path.name != "README.md")
LAST_LINE = re.compile(r"20\d\d-\d\d-\d\d\. Revisit when [^\n]+\.")
MIB = 2**20
NUMBERS: dict[tuple[str, str], Callable[[], tuple[int, ...]]] = {
    ("benchmarks.md", r"trains (\d+) configurations with the code"): lambda: (len(golden.CASES) + 1,),
    ("benchmarks.md", r"trains (\d+) configurations of two commits"): lambda: (len(regress.CONFIGURATIONS),),
    ("benchmarks.md", r"faults of (\d+) kinds"): lambda: (len(fault_kinds.KINDS),),
    ("decisions/parallel.md", r"(\d+) of (\d+): each axis"): lambda: (len(QUICK), len(all_cases())),
    ("decisions/parallel.md", r"Price: (\d+) comparisons"): lambda: (len(MISTAKES),),
    ("decisions/config.md", r"at most (\d+) MiB, ([\d,]+) values and (\d+) levels"): lambda: (
        config_sources.MAX_FILE_BYTES // MIB, config_sources.MAX_VALUES, config_sources.MAX_DEPTH,
    ),
    ("data.md", r"more than (\d+) MiB, a line of `.jsonl` of more than (\d+) MiB"): lambda: (
        sources.DOCUMENT_BYTES // MIB, kinds.LINE_BYTES // MIB,
    ),
    ("design.md", r"`trainer.py` \| at most (\d+) lines"): lambda: (shape.MOST_LINES["trainer"],),
    ("design.md", r"scripts \| at most (\d+) lines"): lambda: (shape.MOST_LINES["script"],),
    ("design.md", r"class \| at most (\d+) lines"): lambda: (shape.MOST_LINES["class"],),
    ("design.md", r"median at most (\d+) lines, 90th percentile at most (\d+), longest at most (\d+)"): lambda: (
        shape.FUNCTION_LINES["median"], shape.FUNCTION_LINES["90 %"], shape.FUNCTION_LINES["longest"],
    ),
}  # fmt: skip
"""Numbers that a page of docs/ states about the code: the page, a pattern of them, and what the code says."""


def text_without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text_without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page):
    for link in LINK.findall(text_without_code(page)):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_linked_from_an_index():
    for index in (ROOT / "docs" / "README.md", ROOT / "docs" / "decisions" / "README.md"):
        linked = {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(index.read_text())}
        assert set(index.parent.glob("*.md")) - {index} <= linked


def test_the_map_shows_the_packages_of_today():
    """Regenerate it by python scripts/draw_map.py."""
    assert subprocess.run([sys.executable, ROOT / "scripts" / "draw_map.py", "--check"], check=False).returncode == 0


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140


def test_the_benchmarks_are_one_page():
    assert len((ROOT / "docs" / "benchmarks.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize(("page", "pattern"), NUMBERS)
def test_numbers_are_those_of_the_code(page, pattern):
    text = " ".join((ROOT / "docs" / page).read_text().split())
    stated = [tuple(int(number.replace(",", "")) for number in match.groups()) for match in re.finditer(pattern, text)]
    assert stated, f"docs/{page} no longer says {pattern!r}; remove it from NUMBERS or follow the new words"
    assert set(stated) == {NUMBERS[page, pattern]()}


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_decisions_have_a_date_and_a_reason_to_revisit_them(page):
    """The last line of an entry is such as "2026-11-24. Revisit when torch's kernel is as fast."."""
    _, *entries = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
    wrong = [entry.splitlines()[0] for entry in entries if not LAST_LINE.fullmatch(entry.rstrip().splitlines()[-1])]
    assert not wrong, "end these with a line as '2026-11-24. Revisit when ...': " + "; ".join(wrong)
    titles = [entry.splitlines()[0] for entry in entries]
    assert len(set(titles)) == len(titles)


def test_one_training_step_is_eight_files():
    stated = {name: int(lines) for name, lines in STEP_FILE.findall((ROOT / "docs" / "design.md").read_text())}
    actual = {name: len((ROOT / "torchtitan_clone" / name).read_text().splitlines()) for name in stated}
    assert len(stated) == 8
    assert sum(actual.values()) <= 1600
    for name, lines in stated.items():
        assert abs(lines - actual[name]) <= 0.1 * actual[name], f"update the line count of {name} in docs/design.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page):
    """Paths with a folder are named from the repository or from the package."""
    if page.name == "CHANGELOG.md":  # names files that no longer exist
        return
    for name in SOURCE_FILE.findall(page.read_text()):
        assert any((folder / name).exists() for folder in (ROOT, ROOT / "torchtitan_clone")), name
