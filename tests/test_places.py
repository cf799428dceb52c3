"""Tests are where CONTRIBUTING.md says: unit tests beside a file's name, all others in folders of its table."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "asyncckpt"
CORE_SOURCES = TESTS.parent / "csrc"
PAGE = TESTS.parent / "CONTRIBUTING.md"

FOLDER_ROW = re.compile(r"^\| `tests/(\w+)/` \|[^|]*\|([^|]*)\|$", re.MULTILINE)
ROOM = re.compile(r"`(\w+)`")
CLASS = re.compile(r"class ((?!Test)\w+)")


def subjects_of(room: str) -> set[str]:
    """What a unit test of a room may be named after: its files and packages, the room itself; in native the core's."""
    own = {path.stem for path in (PACKAGE / room).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    core = {path.stem for path in CORE_SOURCES.rglob("*.c*")} if room == "native" else set()
    return (own | core | {Path(room).name}) - {"__init__"}


def is_named_after(name: str, subjects: set[str]) -> bool:
    """`test_manifest` and `test_manifest_of_ranks` are named after `manifest`."""
    words = name.removeprefix("test_").split("_")
    return any("_".join(words[:count]) in subjects for count in range(1, len(words) + 1))


def misnamed(unit: Path) -> list[str]:
    wrong = []
    for path in sorted(unit.glob("*/**/test_*.py")):
        room = path.parent.relative_to(unit).as_posix()
        if not (PACKAGE / room).is_dir() or not is_named_after(path.stem, subjects_of(room)):
            wrong.append(f"{path.relative_to(unit)} is named after no file of asyncckpt/{room}")
    return wrong


def folders_in_table() -> dict[str, set[str]]:
    """The rooms that the table of CONTRIBUTING.md gives to every folder."""
    rows = FOLDER_ROW.findall(PAGE.read_text(encoding="utf-8"))
    return {folder: set(ROOM.findall(rooms)) for folder, rooms in rows}


def rooms() -> set[str]:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    return folders | {path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"}


def classes_named_twice(tests: Path) -> list[str]:
    """Each with its places. A suite (`Test...`) may be in several files: it is pytest's, and nobody's helper."""
    places = defaultdict(list)
    for path in sorted(tests.rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if found := CLASS.match(line):
                places[found[1]].append(f"{path.relative_to(tests)}:{number}")
    return [f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1]


def test_unit_tests_are_named_after_files() -> None:
    assert misnamed(TESTS / "unit") == []


def test_the_table_has_every_folder() -> None:
    folders = {path.parent.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/*.py")}
    assert folders_in_table().keys() == folders


def test_the_table_or_unit_tests_have_every_room() -> None:
    in_table = {room for found in folders_in_table().values() for room in found}
    assert in_table <= rooms()
    with_unit_tests = {path.relative_to(TESTS).parts[1] for path in TESTS.glob("unit/*/**/test_*.py")}
    lists_of_names = {"__main__", "arguments", "errors", "nn", "optim", "options", "table", "version"}
    assert sorted(rooms() - in_table - with_unit_tests - lists_of_names) == []


def test_what_the_twin_leaves_out_is_there() -> None:
    tree = ast.parse((TESTS / "conftest.py").read_text(encoding="utf-8"))
    [names] = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ANY_CORE"
    ]
    assert [name for name in ast.literal_eval(names) if not (TESTS / name).exists()] == []


@pytest.mark.parametrize(
    "wrong",
    ["format/test_rank_parts.py", "format/test_manifests.py", "formats/test_manifest.py", "plan/test_manifest.py"],
)
def test_the_check_sees_a_wrong_name(tmp_path: Path, wrong: str) -> None:
    for name in ("format/test_manifest.py", "format/test_manifest_of_ranks.py", "native/test_idmap.py", wrong):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [line.split()[0] for line in misnamed(tmp_path)] == [wrong]


def test_one_name_is_of_one_helper_class() -> None:
    assert classes_named_twice(TESTS) == []


def test_the_check_sees_a_class_of_a_name_that_is_taken(tmp_path: Path) -> None:
    for name, classes in (("a", "World TestGate"), ("b", "TestGate Gate"), ("c", "Gates World")):
        lines = [f"class {word}:\n    pass" for word in classes.split()]
        (tmp_path / f"{name}.py").write_text("\n".join(lines), encoding="utf-8")
    assert classes_named_twice(tmp_path) == ["World: a.py:1, c.py:3"]
