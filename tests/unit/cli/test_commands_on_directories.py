"""Every command on every kind of directory: one clear line and the exit code that the help promises.

The commands are those of the parser, so that a new one cannot be forgotten.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.cli.commands import parser_of_all
from asyncckpt.cli.findings import ExitCode
from asyncckpt.format.names import LOCK_NAME
from asyncckpt.storage.directory import Directory
from asyncckpt.storage.owner_lock import _lock_file
from bench.start import many_steps
from tests.program import Result, invoke
from tests.read_only import read_only_mount
from tests.worlds.directories import flip_byte

MANY = 5000
# What stands behind DIR; for a command that is not here, the test of all of them fails.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "ls": (),
    "show": (),
    "tree": (),
    "verify": (),
    "diff": (),
    "cat": ("user", "7"),
    "compact": (),
    "rm": ("10",),
    "prune": ("--latest", "2"),
    "pin": ("10",),
    "unpin": ("10",),
    "gc": (),
    "import": ("TARGET",),
    "export": ("TARGET",),
    "follow": ("--until", "30"),
    "doctor": ("--mib", "0"),
}
# What stands before DIR. TARGET is a name beside it that is free.
FORMATS = {"import": ("recis",), "export": ("recis",)}
WITHOUT_DIRECTORY = {"completion": ("bash",)}
PAGES = {"report", "watch"}  # They make a page, and have no --json: tests/observed.
LOOKS = {"ls", "show", "tree", "verify", "diff", "cat", "follow", "doctor"}
LOCKS = {"compact", "rm", "prune", "gc"}
OK, DAMAGED, NOT_FOUND, FAILED = ExitCode.OK, ExitCode.DAMAGED, ExitCode.NOT_FOUND, ExitCode.FAILED

HELD_TO_DOCTOR = FAILED if sys.platform == "linux" else OK  # Other systems do not say that a file is locked.
# Of every kind of directory, the code of most commands, and those of the others.
CODES: dict[str, tuple[ExitCode, dict[str, ExitCode]]] = {
    "good": (OK, {"diff": ExitCode.DIFFERENT}),
    "missing": (NOT_FOUND, {"follow": OK, "doctor": OK}),
    "empty": (NOT_FOUND, {"follow": OK, "doctor": OK}),
    "new": (NOT_FOUND, {"ls": OK, "follow": OK, "doctor": OK, "prune": OK, "gc": OK, "unpin": OK}),
    "foreign": (NOT_FOUND, {"follow": OK, "doctor": OK}),
    "file": (ExitCode.USAGE, {}),
    "corrupt": (DAMAGED, {"doctor": OK, "pin": OK, "unpin": OK, "gc": OK}),
    "read-only": (FAILED, {**dict.fromkeys(LOOKS - {"doctor"}, OK), "diff": ExitCode.DIFFERENT}),
    "held": (OK, {**dict.fromkeys(LOCKS, ExitCode.HELD), "diff": ExitCode.DIFFERENT, "doctor": HELD_TO_DOCTOR}),
    "many": (OK, {"diff": OK}),
}
CODES["read-only"][1]["export"] = OK  # It writes beside it.
for kind, (_, others) in CODES.items():
    others |= {} if kind == "file" else {"import": NOT_FOUND}  # None of these is of RecIS.

# What is found to be wrong is the answer of these.
ANSWERED = {("ls", DAMAGED), ("verify", DAMAGED), ("prune", DAMAGED), ("doctor", FAILED)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints; the last one is a delta upon the second."""
    path = tmp_path_factory.mktemp("model") / "run"
    table = asyncckpt.HashTable("user", 4)
    table.lookup(torch.arange(20))
    state = {"x": torch.ones(3), "epoch": 0}
    policy = asyncckpt.DeltaPolicy(bytes_share_max=100.0)
    with asyncckpt.Saver(path=path, hashtables={"user": table}, tensors=state, deltas=policy) as saver:
        for step, kind in ((10, "full"), (20, "full"), (30, "delta")):
            state["epoch"] = step
            saver.save_async(step, kind=kind).result(60)
    (path / LOCK_NAME).unlink()
    return path


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return many_steps(tmp_path_factory.mktemp("many") / "run", MANY)


@contextmanager
def directory(kind: str, model: Path, place: Path) -> Iterator[Path]:
    path = place / "run"
    held: list[int] = []
    if kind in ("good", "corrupt", "read-only", "held"):
        shutil.copytree(model, path)
    elif kind in ("empty", "foreign"):
        path.mkdir()
    elif kind == "new":
        asyncckpt.Saver(path=path).close()
    if kind == "foreign":
        (path / "model.pt").write_bytes(b"other things")
        (path / "logs").mkdir()
    elif kind == "file":
        path.write_bytes(b"")
    elif kind == "corrupt":
        manifest = path / "manifests" / f"{30:012d}.json"
        flip_byte(manifest, 100)
    elif kind == "held":
        with Directory.open(path) as root:
            held.append(_lock_file(root, LOCK_NAME))  # As another process would: by an open file of its own.
    try:
        with read_only_mount(path) if kind == "read-only" else nullcontext():
            yield path
    finally:
        for fd in held:
            os.close(fd)


def run(command: str, path: Path, *more: str, monkeypatch: pytest.MonkeyPatch) -> Result:
    async def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if command == "follow":  # Where it would wait for the next step, Ctrl-C comes.
            patch.setattr(asyncio, "sleep", interrupted)
        arguments = [path.with_name("ckpt") if word == "TARGET" else word for word in ARGUMENTS[command]]
        return invoke(command, *FORMATS.get(command, ()), path, *arguments, *more)


def names_below(path: Path) -> list[str]:
    return sorted(str(found) for found in path.parent.rglob("*"))


def test_the_matrix_has_every_command() -> None:
    assert parser_of_all()[1].keys() == ARGUMENTS.keys() | WITHOUT_DIRECTORY.keys() | PAGES


@pytest.mark.parametrize("kind", [kind for kind in CODES if kind != "many"])
@pytest.mark.parametrize("command", ARGUMENTS)
def test_every_command_on_every_directory(
    model: Path, tmp_path: Path, command: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, others = CODES[kind]
    code = others.get(command, most)
    for more in ((), ("--json",)):
        place = tmp_path / "-".join(["in", *more])
        place.mkdir()
        with directory(kind, model, place) as path:
            before = names_below(path)
            result = run(command, path, *more, monkeypatch=monkeypatch)
            if command in LOOKS or code != OK:
                assert [name for name in names_below(path) if not name.endswith("/" + LOCK_NAME)] == [
                    name for name in before if not name.endswith("/" + LOCK_NAME)
                ]
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        check_answer(command, result, is_json=bool(more))


def check_answer(command: str, result: Result, *, is_json: bool) -> None:
    """One line on stderr says why a command does not do what it is asked for; else it answers."""
    lines = result.stderr.splitlines()
    if result.exit_code in (OK, ExitCode.DIFFERENT) or (command, result.exit_code) in ANSWERED:
        assert lines == []
        assert result.stdout or command == "follow"
    else:
        assert len(lines) == 1
        assert lines[0].startswith("asyncckpt: ")
        assert is_json or not result.stdout or command == "follow"
    if is_json and command != "follow":
        answer: Any = json.loads(result.stdout)
        assert ("error" in answer) == bool(lines)


@pytest.mark.parametrize("command", ARGUMENTS)
def test_every_command_on_many_steps(many: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    most, others = CODES["many"]
    more = ("--dry-run",) if command in ("rm", "prune", "export") else ()
    result = run(command, many, *more, monkeypatch=monkeypatch)
    assert result.exit_code == others.get(command, most), result.output
    if command == "ls":
        assert result.stdout.splitlines()[0] == f"and {MANY - 40:,} older ones (--most, --json)"
        assert len(result.stdout.splitlines()) == 42


@pytest.mark.parametrize("command", WITHOUT_DIRECTORY)
def test_commands_without_a_directory(command: str) -> None:
    result = invoke(command, *WITHOUT_DIRECTORY[command])
    assert (result.exit_code, result.stderr) == (OK, "")
    assert result.stdout


@pytest.mark.parametrize("command", [*ARGUMENTS, *WITHOUT_DIRECTORY])
def test_every_command_has_help(command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == OK
    assert "Exit codes" in result.stdout
    assert command in WITHOUT_DIRECTORY or "--json" in result.stdout


@pytest.mark.parametrize("command", [*ARGUMENTS, *sorted(PAGES)])
def test_a_directory_without_a_name_is_not_the_current_one(
    model: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a shell's variable that is not set, in a folder that holds checkpoints."""
    with directory("good", model, tmp_path) as path:
        monkeypatch.chdir(path)
        before = names_below(path)
        result = invoke(command, *FORMATS.get(command, ()), "", *ARGUMENTS.get(command, ()))
        assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")
        assert "is empty" in result.stderr.splitlines()[-1]
        assert names_below(path) == before


@pytest.mark.parametrize(
    "words",
    [
        ("import", "recis", "DIR", ""),
        ("export", "recis", "DIR", ""),
        ("diff", "DIR", "--with", ""),
        ("report", "DIR", "-o", ""),
        ("follow", "DIR", "--cursor", ""),
    ],
    ids=lambda words: words[0],
)
def test_other_places_without_a_name_are_refused(model: Path, words: tuple[str, ...]) -> None:
    result = invoke(*(model if word == "DIR" else word for word in words))
    assert result.exit_code == ExitCode.USAGE
    assert "is empty" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", ARGUMENTS)
def test_wrong_usage_is_told_in_a_line(command: str) -> None:
    result = invoke(command)
    assert result.exit_code == ExitCode.USAGE
    assert result.stderr.splitlines()[-1].startswith(f"asyncckpt {command}: error: ")
