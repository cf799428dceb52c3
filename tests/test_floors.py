"""Imports go down only: the floors of docs/architecture.md, read from the source.

Every import counts, also those inside functions and under TYPE_CHECKING. `asyncckpt/__init__.py` is the front door and
may import everything.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ratchet.limits import DOORS

PACKAGE = Path(__file__).resolve().parents[1] / "asyncckpt"
LINES_MAX = 400
TWICE_LINES = 10

FLOORS = {
    "errors": 0,
    "version": 0,
    "system": 0,
    "options": 0,
    "model": 0,
    "arguments": 0,
    "signals": 0,
    "native": 1,
    "format": 2,
    "storage": 2,
    "plan": 3,
    "tables": 3,
    "staging": 3,
    "modules": 3,
    "coordination": 3,
    "devices": 3,
    "snapshot": 4,
    "pipeline": 4,
    "shard": 4,
    "commit": 4,
    "engine": 5,
    "saver": 6,
    "events": 6,
    "observe": 6,
    "nn": 6,
    "optim": 6,
    "table": 6,
    "loader": 6,
    "states": 6,
    "periodic": 6,
    "checkpointer": 6,
    "checkpointer_options": 6,
    "checkpoints": 6,
    "compaction": 6,
    "inspection": 6,
    "removals": 6,
    "follower": 6,
    "filters": 6,
    "trainer_state": 6,
    "adapters": 4,
    "dcp": 6,
    "embcache": 6,
    "formats": 6,
    "strategies": 6,
    "cli": 7,
    "integrations": 7,
    "__main__": 8,
    "testing": 7,
}
# Rooms of the same floor that may know each other.
NEIGHBOURS = {
    ("checkpoints", "removals"),  # Where users find them; what only looks does not import them.
    ("modules", "tables"),
    ("signals", "errors"),
    ("signals", "arguments"),
    ("signals", "system"),
    ("model", "errors"),
    ("model", "arguments"),
    ("arguments", "errors"),
    ("options", "arguments"),
    ("options", "errors"),
    ("observe", "checkpoints"),  # Its page shows what these say of a directory.
    ("checkpointer", "saver"),  # A Checkpointer is a Saver, a PeriodicSaver and a Loader over one state.
    ("checkpointer", "periodic"),
    ("checkpointer", "loader"),
    ("checkpointer", "checkpointer_options"),
    ("checkpointer_options", "saver"),
    ("periodic", "saver"),  # A PeriodicSaver is used around a Saver.
    ("states", "saver"),  # A state is saved by a Saver, and loaded by a Loader without targets.
    ("states", "loader"),
    ("strategies", "saver"),  # They save and load by the usual door.
    ("strategies", "loader"),
    ("formats", "saver"),  # A file of torch.save is saved as any other state.
    ("formats", "embcache"),  # Its Saver reads RecSDK's files too.
    ("formats", "dcp"),  # The command line converts its checkpoints as those of other libraries.
    ("embcache", "saver"),  # Its Saver keeps one of these per folder and rank.
}
# The groups of engine/: a group imports from itself and from lower ones.
GROUPS = {
    "process": 0,
    "inspect": 0,
    "save": 1,
    "load": 1,
    "upload": 2,
    "compact": 2,
    "follow": 3,
    "features": 3,
    "ranks": 4,
}
MODEL_MAY_IMPORT = {"torch", "numpy"}
# What reads or writes files; the names of `os` that format/ may use are none.
FILE_MODULES = {"os", "io", "pathlib", "shutil", "tempfile", "mmap", "fcntl", "aiofiles", "glob", "fileinput"}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import statement; a relative one comes out as its leading dots."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "." * node.level + (node.module or "")
        elif isinstance(node, ast.ImportFrom):
            # `from asyncckpt import saver` names a room only in its second half.
            parts = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "asyncckpt" else []
            yield from ((node.lineno, name) for name in parts or [str(node.module)])


def rooms_imported(path: Path) -> Iterator[tuple[int, str]]:
    for line, name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "asyncckpt" and len(parts) > 1:
            yield line, parts[1]


def shown(path: Path, line: int, what: str) -> str:
    return f"{path.relative_to(PACKAGE.parent)}:{line} {what}"


def may_import(room: str, other: str) -> bool:
    if room == other or (room, other) in NEIGHBOURS:
        return True
    return FLOORS[other] < FLOORS[room]


def violations(path: Path) -> list[str]:
    room = room_of(path)
    wrong = []
    for line, other in rooms_imported(path):
        if other not in FLOORS:
            wrong.append(shown(path, line, f"imports {other!r}, which is on no floor"))
        elif not may_import(room, other):
            wrong.append(shown(path, line, f"({room}, floor {FLOORS[room]}) imports {other} (floor {FLOORS[other]})"))
    return wrong


def test_every_room_has_a_floor() -> None:
    assert {room_of(path) for path in modules()} <= FLOORS.keys()


def test_imports_go_down() -> None:
    assert [text for path in modules() for text in violations(path)] == []


def groups_imported(path: Path) -> list[str]:
    """What a module of engine/ imports from groups that are not below its own."""
    own = path.relative_to(PACKAGE / "engine").parts[0]
    found = [(line, name.split(".")) for line, name in imports_of(path) if name.startswith("asyncckpt.engine.")]
    return [
        shown(path, line, f"({own}) imports {parts[2]}")
        for line, parts in found
        if parts[2] != own and GROUPS[parts[2]] >= GROUPS[own]
    ]


def test_the_core_imports_no_door() -> None:
    core = [path for path in modules() if room_of(path) not in (*DOORS, "__main__")]  # That is the command line's own.
    doors = [
        shown(path, line, f"imports {room}") for path in core for line, room in rooms_imported(path) if room in DOORS
    ]
    assert not doors


def test_groups_of_the_engine_import_down() -> None:
    """Above all: the plain save knows no feature and no ranks."""
    paths = [path for path in (PACKAGE / "engine").rglob("*.py") if path.parent != PACKAGE / "engine"]
    assert {path.relative_to(PACKAGE / "engine").parts[0] for path in paths} == GROUPS.keys()
    assert [text for path in paths for text in groups_imported(path)] == []


def test_the_check_of_groups_sees_a_wrong_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "asyncckpt" / "engine" / "save"
    folder.mkdir(parents=True)
    source = "if TYPE_CHECKING:\n    from asyncckpt.engine.ranks.replicas import Replicas\n"
    (folder / "wrong.py").write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "asyncckpt")
    assert len(groups_imported(folder / "wrong.py")) == 1


def test_imports_are_absolute() -> None:
    relative = [shown(path, line, name) for path in modules() for line, name in imports_of(path) if name[0] == "."]
    assert relative == []


def test_words_know_only_standard_library_torch_and_numpy() -> None:
    known = {*sys.stdlib_module_names, *MODEL_MAY_IMPORT, "asyncckpt"}
    foreign = [
        shown(path, line, name)
        for path in modules()
        if FLOORS[room_of(path)] == 0
        for line, name in imports_of(path)
        if name.split(".")[0] not in known
    ]
    assert foreign == []


def test_format_does_no_input_or_output() -> None:
    found = []
    for path in modules():
        if room_of(path) != "format":
            continue
        found += [shown(path, n, name) for n, name in imports_of(path) if name.split(".")[0] in FILE_MODULES]
        calls = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
        found += [
            shown(path, node.lineno, "open()")
            for node in calls
            if isinstance(node.func, ast.Name) and node.func.id == "open"
        ]
    assert found == []


def test_only_native_loads_the_compiled_core() -> None:
    found = [
        shown(path, line, name)
        for path in modules()
        if room_of(path) not in ("native", "storage", "signals")  # These ask libc for renameat2 and sigaction.
        for line, name in imports_of(path)
        if name.split(".")[0] == "ctypes"
    ]
    assert found == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("format", "def late():\n    from asyncckpt.storage.directory import Directory\n"),
        ("plan", "if TYPE_CHECKING:\n    from asyncckpt.tables.hash_table import HashTable\n"),
        ("commit", "import asyncckpt.shard.reader\n"),
        ("engine", "from asyncckpt import saver\n"),
        ("storage", "from asyncckpt.format.names import LOCK_NAME\n"),
        ("model", "from asyncckpt.native import core\n"),
    ],
)
def test_the_check_sees_a_wrong_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: str, source: str) -> None:
    folder = tmp_path / "asyncckpt" / room
    folder.mkdir(parents=True)
    (folder / "wrong.py").write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "asyncckpt")
    assert len(violations(folder / "wrong.py")) == 1


def test_files_are_short() -> None:
    lines_of = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {name: count for name, count in lines_of.items() if count > LINES_MAX} == {}


def test_no_ten_lines_but_imports_stand_twice() -> None:
    places: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        lines = [line for line in lines if line and not line.startswith(("import ", "from "))]
        for number in range(len(lines) - TWICE_LINES + 1):
            places[tuple(lines[number : number + TWICE_LINES])].append(path.name)
    assert len(places) > 10_000
    assert [(files, lines[0]) for lines, files in places.items() if len(files) > 1] == []
