"""The documentation site: every page is found, every public name is in the reference, figures are those of their files.

`make docs` builds it and checks links and anchors; what is here needs no mkdocs.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import asyncckpt

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
# Pages that no menu leads to: the list of decisions links to each.
OUTSIDE_THE_MENU = re.compile(r"decisions/\d{4}-.*\.md")
# Pages of the site that are made from files outside of docs/ (website/site_links.py).
MADE = {"changes.md", "contributing.md"}
README_LINES_MAX = 120
# Public modules, with names of their own that the reference has to have.
MODULES = {"nn", "optim", "filters", "table", "checkpoints", "inspection", "follower", "trainer_state"}
PACKAGES = {"adapters", "dcp", "embcache", "formats.recis"}
NOT_FOR_USERS = {"check_filters", "LookupTracking"}


def menu() -> list[str]:
    text = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    nav = text.partition("\nnav:\n")[2].partition("\ntheme:\n")[0]
    return re.findall(r": ([\w/-]+\.md)$", nav, re.MULTILINE)


def missing_from(pages: list[str], listed: list[str]) -> list[str]:
    return [page for page in pages if page not in listed and not OUTSIDE_THE_MENU.fullmatch(page)]


def pages() -> list[str]:
    return sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_every_page_is_in_the_menu_once() -> None:
    assert missing_from(pages(), menu()) == [], "add a line to nav in mkdocs.yml"
    assert sorted(set(menu()) - MADE - set(pages())) == []
    assert len(menu()) == len(set(menu()))


def test_the_check_sees_a_page_that_was_forgotten() -> None:
    assert missing_from(["saving.md", "new.md", "decisions/0001-x.md"], ["saving.md"]) == ["new.md"]


def test_every_decision_is_in_their_list() -> None:
    listed = (DOCS / "decisions/README.md").read_text(encoding="utf-8")
    assert [path.name for path in (DOCS / "decisions").glob("0*.md") if path.name not in listed] == []


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    named = set(re.findall(r"^::: (asyncckpt[\w.]+)$", text, re.MULTILINE))
    wanted = {f"asyncckpt.{name}" for name in asyncckpt.__all__ if name not in MODULES}
    for module in MODULES | PACKAGES:
        names = set(import_module(f"asyncckpt.{module}").__all__) - NOT_FOR_USERS
        also = asyncckpt.__all__ if module in MODULES else ()  # Under the shorter name.
        wanted |= {f"asyncckpt.{module}.{name}" for name in names if name not in also}
    assert sorted(wanted - named) == []
    for name in named:
        module, _, last = name.rpartition(".")
        assert hasattr(import_module(module), last), name


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES_MAX


@pytest.mark.parametrize("page", [DOCS / "index.md", REPOSITORY / "README.md"], ids=lambda path: path.name)
def test_the_five_lines_at_the_top_are_run(page: Path) -> None:
    """As lines of the README's program: test_snippets.py."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    program = "".join(re.findall(r"^```python\n(.*?)^```$", readme, re.M | re.S)).splitlines()
    [block] = re.findall(r"^```py(?:thon)?\n(with .*?)^```$", page.read_text("utf-8"), re.M | re.S)
    lines = [line.partition("  #")[0] for line in block.splitlines()]
    assert [line for line in lines if line not in program] == []
    assert len(lines) <= 5


# Figures. A table behind `<!-- figures: FILE -->` has numbers of that file alone, rounded.
MARKED = re.compile(r"<!-- figures: (\S+) -->\n\n((?:\|.*\n)+)")
NUMBER = re.compile(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w.])")


def numbers_of(text: str) -> set[str]:
    return {number.replace(",", "") for number in NUMBER.findall(text)}


def is_rounded(figure: str, exact: set[str]) -> bool:
    digits = len(figure.partition(".")[2])
    half = 0.5001 * 10**-digits
    return any(abs(float(number) - float(figure)) <= half for number in exact)


def wrong_figures(page: str) -> list[str]:
    wrong = []
    for name, table in MARKED.findall(page):
        exact = numbers_of((REPOSITORY / name).read_text(encoding="utf-8").replace("x ", " ").replace("%", " "))
        for row in table.splitlines()[2:]:
            cells = "|".join(row.split("|")[2:]).replace("*", "")
            wrong += [f"{name}: {figure}" for figure in sorted(numbers_of(cells)) if not is_rounded(figure, exact)]
    return wrong


PAGES = (REPOSITORY / "README.md", *sorted(DOCS.glob("*.md")))
MARKED_PAGES = [path for path in PAGES if "<!-- figures:" in path.read_text("utf-8")]


@pytest.mark.parametrize("page", MARKED_PAGES, ids=lambda path: path.name)
def test_figures_are_those_of_the_results(page: Path) -> None:
    assert wrong_figures(page.read_text(encoding="utf-8")) == []


def test_the_check_sees_a_wrong_figure() -> None:
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert "| 6.396 |" in page
    assert wrong_figures(page.replace("| 6.396 |", "| 6.386 |")) == ["bench/results/2026-11-21-state-2GiB.txt: 6.386"]


def test_every_result_is_on_a_page() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    results = [path.name for path in (REPOSITORY / "bench/results").glob("*.txt") if "smoke" not in path.name]
    assert [name for name in results if f"bench/results/{name}" not in text] == []
