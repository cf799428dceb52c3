"""Whatever only reads, beside retention of another process: before each of its operations of the storage steps go.

At one operation after the other all steps but two new ones go, or from there on one at each operation. What is gone is
no damage: a reader of the newest step, or of all, finds what is left, and one of a named step that there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import asyncckpt
import asyncckpt.dcp
from asyncckpt import KeepPolicy, checkpoints, inspection
from asyncckpt.cli.commands import parser_of_all
from asyncckpt.cli.findings import ExitCode
from asyncckpt.commit import removal, retention
from asyncckpt.commit.discover import KnownHeads
from asyncckpt.commit.retention import retain
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.errors import ConflictError, CorruptError, NotFoundError
from asyncckpt.formats import hf, recis, torch_file
from tests.chains.model import layer_of, new_table
from tests.chains.written import Written, write
from tests.pairs.gate import READS, before_each_operation
from tests.pairs.world import MEMORY_FILE_SYSTEM
from tests.program import invoke

Reader = Callable[[Path], object]
NEWEST, NAMED, ANCHOR = 8, 4, 2
PUBLISHED = (7, 8)  # Meanwhile.
POLICY = KeepPolicy(latest=2, every_steps=2, every_hours=1, best=1, metric="loss")


def load(path: Path) -> None:
    asyncckpt.Loader(path, {"user": new_table()}, {"x": torch.ones(2)}).load()


def load_by_dcp(path: Path) -> None:
    dcp.load({"x": torch.ones(2)}, storage_reader=asyncckpt.dcp.StorageReader(path))


def follow(path: Path) -> None:
    async def take_all() -> None:
        async with asyncckpt.follow(path, poll_seconds=0.01, until=6) as follower:
            async for update in follower:
                await update.rows("user")
                await update.removed("user")

    asyncio.run(take_all())


def summaries(path: Path) -> None:
    for found in checkpoints.summaries(path).values():
        if isinstance(found, Exception):
            raise found


def export(path: Path) -> None:
    target = path.parent / "recis"
    shutil.rmtree(target, ignore_errors=True)
    recis.export_checkpoint(path, target, columns={"adagrad_sum": "sum"}, durability="none")


def export_to(name: str, convert: Callable[[Path, Path], object]) -> Reader:
    def export(path: Path) -> None:
        target = path.parent / name
        shutil.rmtree(target, ignore_errors=True)
        target.unlink(missing_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # Of the table that is left out.
            convert(path, target)

    return export


# By what each calls. Those of named steps may say that there is no such step; all others find what is left.
OF_ALL: dict[str, Reader] = {
    "list_steps": checkpoints.list_steps,
    "summaries": summaries,
    "describe": checkpoints.describe,
    "verify": checkpoints.verify,
    "pinned_steps": checkpoints.pinned_steps,
    "prune": lambda path: checkpoints.prune(path, 1, dry_run=True),
    "prune by rules": lambda path: checkpoints.prune(path, POLICY, dry_run=True),
    "outline": inspection.outline,
    "compare": lambda path: inspection.compare(path, None, None),
    "find_rows": lambda path: inspection.find_rows(path, "user", [0]),
    "follow": follow,
    "load": lambda path: asyncckpt.load(path),
    "Loader": load,
    "dcp": load_by_dcp,
    "export": export,
    "export torch": export_to("torch", lambda path, to: torch_file.export_checkpoint(path, to, durability="none")),
    "export dcp": export_to("dcp", asyncckpt.dcp.export_checkpoint),
    "export hf": export_to("hf", lambda path, to: hf.export_checkpoint(path, to, durability="none")),
}
OF_NAMED: dict[str, Reader] = {
    "describe": lambda path: checkpoints.describe(path, NAMED),
    "verify": lambda path: checkpoints.verify(path, NAMED),
    "remove": lambda path: checkpoints.remove(path, [5, NAMED], dry_run=True),
    "remove_after": lambda path: checkpoints.remove_after(path, ANCHOR, dry_run=True),
    "outline": lambda path: inspection.outline(path, NAMED),
    "compare": lambda path: inspection.compare(path, ANCHOR, NAMED),
    "find_rows": lambda path: inspection.find_rows(path, "user", [0], NAMED),
    "load": lambda path: asyncckpt.load(path, NAMED),
}
COMMANDS_OF_ALL: dict[str, tuple[object, ...]] = {
    "ls": (),
    "show": (),
    "tree": (),
    "verify": (),
    "verify --all": (),
    "diff": (),
    "cat": ("user", 0),
    "prune --dry-run": ("--latest", 2, "--every-hours", 1),
    "follow": ("--poll", 0.01, "--until", 6),
    "doctor": ("--mib", 0),
    "report": ("--output", lambda path: path.with_name("report.html")),
}
COMMANDS_OF_NAMED: dict[str, tuple[object, ...]] = {
    "show": (NAMED,),
    "tree": (NAMED,),
    "verify": (NAMED,),
    "diff": (ANCHOR, NAMED),
    "cat": ("user", 0, "--step", NAMED),
    "rm --dry-run": (5, NAMED),
    "rm": ("--dry-run", "--after", ANCHOR),
}
CHANGES = {"collect_garbage", "pin", "prune", "remove", "remove_after", "unpin"}
COMMANDS_OF_CHANGES = {"compact", "gc", "import", "pin", "unpin"}


def test_every_function_and_command_is_here() -> None:
    functions = {
        name
        for module in (checkpoints, inspection)
        for name in module.__all__
        if inspect.isfunction(getattr(module, name)) and "path" in inspect.signature(getattr(module, name)).parameters
    }
    assert functions - CHANGES <= OF_ALL.keys()
    assert {"prune", "remove", "remove_after"} <= OF_ALL.keys() | OF_NAMED.keys()
    commands = {name.split()[0] for name in [*COMMANDS_OF_ALL, *COMMANDS_OF_NAMED]}
    assert parser_of_all()[1].keys() - COMMANDS_OF_CHANGES - {"completion", "watch"} == commands | {"export"}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1 <- 2, 3 <- 4 <- 5, 6, 7 and 8; of the last two the manifests are beside the directory."""
    path = tmp_path_factory.mktemp("template") / "run"
    found: dict[int, Written] = {}
    for step in range(1, NEWEST + 1):
        chain = found[step - 1].chain if step in (2, 4, 5) else ()
        found[step] = write(
            path,
            step,
            {"user": layer_of({0: (float(step),) * 4})},
            dense={"x": torch.ones(2)},
            parents=chain,
            metadata={"loss": float(step)},
        )
    for step in PUBLISHED:
        found[step].manifest.rename(path / found[step].manifest.name)
    return path


class Retention:
    """That of another process, which publishes two steps at operation `at`, and lets others go.

    creeps: one at that and at each later one; else all at that.
    """

    def __init__(self, path: Path, at: int, *, creeps: bool) -> None:
        self._path, self._at, self._creeps = path, at, creeps
        self._guard = threading.RLock()
        self._is_acting = False
        self.count = 0

    def __call__(self) -> None:
        with self._guard:
            if self._is_acting:
                return
            self.count += 1
            late = self.count - self._at
            if late == 0 or (self._creeps and late > 0):
                self._is_acting = True
                try:
                    self._act(max(2, NEWEST - 1 - late) if self._creeps else 2)
                finally:
                    self._is_acting = False

    def _act(self, keep: int) -> None:
        for hidden in self._path.glob("*.json"):
            hidden.rename(self._path / "manifests" / hidden.name)
        with pytest.MonkeyPatch.context() as patch, CheckpointRoot.for_reading(self._path) as root:
            patch.setattr(removal, "under_way", set())
            patch.setattr(retention, "_retaining", threading.Lock())
            retain(root, KnownHeads(root), KeepPolicy(latest=keep))


def disturbed(read: Reader, template: Path, path: Path, *, creeps: bool, places: int | None = None) -> int:
    """Read beside a retention at each of its operations, or at so many places; return how many operations it has."""
    count, at, every = 1, 0, 1
    while at <= count:  # The first time alone.
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(template, path)
        other = Retention(path, at, creeps=creeps and at > 0)
        with before_each_operation(other, more=READS):
            read(path)
        if at == 0:
            count = other.count
            every = 1 if places is None else max(1, count // places)
        at += every
    return count


def or_not_found(read: Reader) -> Reader:
    def run(path: Path) -> None:
        with contextlib.suppress(NotFoundError):
            read(path)

    return run


def command(words: str, *more: object, codes: set[ExitCode]) -> Reader:
    name, *options = words.split()

    def run(path: Path) -> None:
        arguments = [argument(path) if callable(argument) else argument for argument in more]
        result = invoke(name, path, *arguments, *options)
        assert result.exit_code in codes, result.output

    return run


READERS = {
    **{name: read for name, read in OF_ALL.items()},
    **{f"{name} of a step": or_not_found(read) for name, read in OF_NAMED.items()},
    **{
        f"asyncckpt {words}": command(words, *more, codes={ExitCode.OK, ExitCode.DIFFERENT})
        for words, more in COMMANDS_OF_ALL.items()
    },
    **{
        f"asyncckpt {words} of a step": command(
            words, *more, codes={ExitCode.OK, ExitCode.DIFFERENT, ExitCode.NOT_FOUND}
        )
        for words, more in COMMANDS_OF_NAMED.items()
    },
}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In memory, where it can be: each place needs a directory of its own."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    parent = MEMORY_FILE_SYSTEM if Path(MEMORY_FILE_SYSTEM).is_dir() else tmp_path
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder) / "run"


@pytest.mark.parametrize("name", sorted(READERS.keys() - {"asyncckpt doctor"}))
def test_what_goes_meanwhile_is_no_damage(name: str, template: Path, path: Path) -> None:
    creeps = len(name) % 2 == 0
    assert disturbed(READERS[name], template, path, creeps=creeps, places=5) > 1


@pytest.mark.slow
@pytest.mark.parametrize("creeps", [False, True], ids=["at once", "one by one"])
@pytest.mark.parametrize("name", READERS)
def test_what_goes_at_any_moment_is_no_damage(name: str, creeps: bool, template: Path, path: Path) -> None:
    assert disturbed(READERS[name], template, path, creeps=creeps) > 1


@pytest.mark.parametrize(("name", "module"), [("prune", "commit.retention"), ("find_rows", "inspection")])
def test_without_a_second_look_they_report_it(
    name: str, module: str, template: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"asyncckpt.{module}.look_again", lambda _, look: look())
    monkeypatch.setattr("asyncckpt.commit.retention.LOOKS_MAX", 1)
    with pytest.raises((CorruptError, ConflictError, NotFoundError)):
        disturbed(READERS[name], template, path, creeps=False)
