"""Every snippet of the README and of docs/ runs, and what it prints is what the page says.

A page is one program: its ```python blocks run in order, in one namespace and one empty folder. A ```text block right
after one is its output; a ```console block holds `$ asyncckpt ...` and what that prints. In both, `...` stands for
anything, and in console blocks a number with a unit (`13.5 KiB`) for any. A ```python block that begins with the
comment `# <name>.py` is a file, which a ```console block runs with `$ python ...` or `$ torchrun ...`.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.program import invoke
from tests.ranks.processes import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
# Pages whose snippets are run elsewhere, and by which test.
ELSEWHERE = {
    "docs/adapters.md": "tests/adapters/test_page.py",
    "docs/index.md": "tests/docs/test_site.py",
    "docs/lightning.md": "tests/integrations/test_pages.py",
    "docs/table-suite.md": "tests/testing/test_documented_suite.py",
    "docs/transformers.md": "tests/integrations/test_pages.py",
}
PAGES = ["README.md"] + [
    name
    for path in sorted((REPOSITORY / "docs").rglob("*.md"))
    if "```python" in path.read_text(encoding="utf-8")
    and (name := path.relative_to(REPOSITORY).as_posix()) not in ELSEWHERE
]
SLOW = {"docs/large-models.md", "docs/several-ranks.md", "docs/tables.md"}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"\d[\d,.]*(?= (?:B|KiB|MiB|GiB|ms|s)\b)")
FILE = re.compile(r"# (\w+\.py)\n")
MATCHING = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Snippet:
    """A fenced block: its language, text, the line it begins at, and what stands between it and the last one."""

    language: str
    text: str
    line: int
    behind: str


def blocks_of(page: str) -> list[Snippet]:
    blocks = []
    end = 0
    for match in FENCED.finditer(page):
        line = page.count("\n", 0, match.start()) + 2
        blocks.append(Snippet(match.group(1), match.group(2), line, page[end : match.start()].strip()))
        end = match.end()
    return blocks


def run_python(block: Snippet, page: str, namespace: dict[str, Any]) -> str:
    # Line numbers of a traceback are those of the page.
    code = compile("\n" * (block.line - 1) + block.text, page, "exec")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, namespace)
    return printed.getvalue()


def run_program(arguments: list[str]) -> str:
    """What it prints on its standard output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run_torchrun(arguments: list[str]) -> str:
    """What all ranks print on their standard output."""
    return run_program(["-m", "torch.distributed.run", "--master-port", str(free_port()), *arguments])


RUNS = {"asyncckpt": lambda arguments: invoke(*arguments).output, "python": run_program, "torchrun": run_torchrun}


def run_console(block: Snippet) -> tuple[str, str]:
    """What the block expects and what its commands print."""
    expected, printed = [], []
    for line in block.text.splitlines():
        if not line.startswith("$ "):
            expected.append(line)
            continue
        program, *arguments = shlex.split(line[2:], comments=True)
        assert program in RUNS, f"line {block.line}: only {', '.join(RUNS)} can be run here"
        printed.append(RUNS[program](arguments))
    return without_figures("\n".join(expected) + "\n"), without_figures("".join(printed))


def without_figures(text: str) -> str:
    return FIGURE.sub("n", text)


def check(page: str, block: Snippet, expected: str, printed: str) -> None:
    if not doctest.OutputChecker().check_output(expected, printed, MATCHING):
        pytest.fail(f"{page}:{block.line} prints\n{printed}\nnot\n{expected}", pytrace=False)


def test_only_numbers_with_a_unit_are_left_out() -> None:
    assert without_figures("step 499: 16 blocks, 1,024.5 KiB in 0.2 s") == "step 499: 16 blocks, n KiB in n s"


@pytest.mark.parametrize(("page", "test"), ELSEWHERE.items())
def test_pages_that_are_run_elsewhere_are_named_there(page: str, test: str) -> None:
    source = (REPOSITORY / test).read_text(encoding="utf-8")
    assert Path(page).name in source


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow) if page in SLOW else page for page in PAGES]
)
def test_snippets_do_what_the_page_says(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(page)


def run_page(page: str) -> None:
    """Run all blocks of a page in the current folder, and compare what they print."""
    blocks = blocks_of((REPOSITORY / page).read_text(encoding="utf-8"))
    assert any(block.language == "python" for block in blocks)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed, last = "", None
    for block in blocks:
        if block.language == "python" and (file := FILE.match(block.text)) is not None:
            Path(file.group(1)).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            last, printed = block, run_python(block, page, namespace)
        elif block.language == "text" and last is not None and block.behind == "":
            check(page, block, block.text, printed)
        elif block.language == "console" and any(f"$ {program}" in block.text for program in RUNS):
            check(page, block, *run_console(block))
        if block.language != "python":
            last = None


def test_links_lead_somewhere() -> None:
    broken = []
    for page in [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(REPOSITORY)}: {target}")
    assert broken == []
