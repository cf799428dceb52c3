"""The table in README.md tells the truth: every case has its tests, in the files it names, and every test its case."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROW = re.compile(r"\| (\d+) \| [^|]+ \| ([^|]+) \| [^|]+ \|")
CASES = dict(ROW.findall((FOLDER / "README.md").read_text(encoding="utf-8")))
APPLICABLE = [*range(1, 65), *range(77, 118)]


def cases_of(path: Path) -> set[int]:
    names = re.findall(r"^(?:async )?def test_case((?:_\d{3})+)_", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {int(number) for name in names for number in name.strip("_").split("_")}


def test_every_case_is_in_the_table() -> None:
    assert [int(number) for number in CASES] == APPLICABLE


@pytest.mark.parametrize("path", sorted(FOLDER.glob("test_*.py")), ids=lambda path: path.name)
def test_the_table_names_the_files_with_tests_of_a_case(path: Path) -> None:
    assert cases_of(path) == {int(number) for number, files in CASES.items() if path.name in files.split(", ")}
