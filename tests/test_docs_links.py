"""Links, sizes and file names that the documentation states are right."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
SOURCE_FILE = re.compile(r"`([\w.]+/[\w./]+\.(?:py|sh|toml))`")
STEP_FILE = re.compile(r"\| `torchtitan_clone/([\w/]+\.py)` \| (\d+) \|")
DECISIONS = sorted(path for path in (ROOT / "docs" / "decisions").glob("*.md") if path.name != "README.md")
LAST_LINE = re.compile(r"20\d\d-\d\d-\d\d\. Revisit when [^\n]+\.")


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


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_benchmarks_are_one_page():
    assert len((ROOT / "docs" / "benchmarks.md").read_text().splitlines()) <= 200


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
