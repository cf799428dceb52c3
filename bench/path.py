"""The way that a save or a load takes through the code: files and functions of asyncckpt/ that it crosses.

    python -m bench path             each case, beside its goal, and room by room
    python -m bench path --list      also the names of the files

A reader who wants to know what a save does has to read these. Counted are the functions that run from the call until
the result is there and the threads behind it have ended, on all threads of the process, by the interpreter's profiler;
what runs when a module is imported does not count, nor do comprehensions. Each case has a process of its own, and is
measured when it has been done before: a first save also makes what later ones use.

    save     a save_async of a dict of tensors and plain values, until it is durable
    delta    the same of a HashTable and a tensor, as a delta
    ranks    rank 0's part of a save by two ranks of torch.distributed (gloo), each a process
    load     a load of that dict from a full checkpoint
    chain    a load of a HashTable and the dict from a delta and the full checkpoint below it
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed

import asyncckpt
from bench.report import make_console, print_table, write_json
from bench.rounds import REPOSITORY, run_child, scratch_folder

PACKAGE = Path(asyncckpt.__file__).parent
GOALS = {"save": 34, "delta": 45, "ranks": 48, "load": 34, "chain": 44}
WAIT_S = 60.0
MEASURED = 5
NOT_FUNCTIONS = {"<module>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>"}
CO_NEWLOCALS = 0x2  # Functions have it, bodies of classes do not.


@dataclass(frozen=True)
class PathSpec:
    """What one process shall do."""

    figures_path: str
    directory: str
    case: str
    rank: int = 0


class Crossed:
    """The functions of asyncckpt/ that were called, by file."""

    def __init__(self) -> None:
        self._codes: set[CodeType] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count calls of this thread and of those that begin meanwhile, until all of these have ended."""
        others = set(threading.enumerate())
        threading.setprofile(self._call)
        sys.setprofile(self._call)
        try:
            yield
            _wait_for_threads(others)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _call(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._codes.add(frame.f_code)

    def functions(self) -> dict[str, list[str]]:
        """{file below asyncckpt/: its functions}."""
        found: dict[str, set[str]] = {}
        for code in self._codes:
            path = Path(code.co_filename)
            if code.co_flags & CO_NEWLOCALS and code.co_name not in NOT_FUNCTIONS and path.is_relative_to(PACKAGE):
                name = f"{code.co_name}:{code.co_firstlineno}"
                found.setdefault(str(path.relative_to(PACKAGE)), set()).add(name)
        return {path: sorted(found[path]) for path in sorted(found)}


def _wait_for_threads(others: set[threading.Thread]) -> None:
    """Until the library's threads that are none of the others have ended."""
    until = time.monotonic() + WAIT_S
    while any(one.name.startswith("asyncckpt") and not one.daemon for one in set(threading.enumerate()) - others):
        if time.monotonic() > until:
            raise TimeoutError(f"threads have not ended within {WAIT_S} s")
        time.sleep(0.005)


# -- the cases ---------------------------------------------------------------------------------------------------------


def _state() -> dict[str, Any]:
    return {
        "model": {"weight": torch.ones(64, 32), "bias": torch.zeros(32)},
        "optimizer": [torch.ones(64, 32), {"step": 3, "rate": 0.1}],
        "epoch": 7,
    }


def _table() -> asyncckpt.HashTable:
    table = asyncckpt.HashTable("users", dim=8)
    table.lookup(torch.arange(1000))
    return table


def _save(spec: PathSpec) -> Crossed:
    state = _state()
    with asyncckpt.Saver(path=spec.directory, tensors=state) as saver:
        return _warm(lambda: saver.save_async().result(WAIT_S))


def _delta(spec: PathSpec) -> Crossed:
    table, state = _table(), {"weight": torch.ones(64, 32)}
    with asyncckpt.Saver(path=spec.directory, hashtables={"users": table}, tensors=state) as saver:
        saver.save()
        return _warm(
            lambda: saver.save_async(kind="delta").result(WAIT_S),
            train=lambda: table.lookup(torch.arange(500, 1100)),  # Marks old rows and adds new ones.
        )


def _ranks(spec: PathSpec) -> Crossed:
    folder = Path(spec.directory)
    other = None
    if spec.rank == 0:
        content = {**asdict(spec), "rank": 1, "figures_path": f"{spec.figures_path}-1"}
        other = subprocess.Popen([sys.executable, "-m", "bench.path", json.dumps(content)], cwd=REPOSITORY)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = torch.distributed.FileStore(str(folder / "store"), 2)  # type: ignore[no-untyped-call]
    torch.distributed.init_process_group("gloo", store=store, rank=spec.rank, world_size=2)
    try:
        with asyncckpt.Saver(spec.rank, 2, path=folder / "checkpoints", tensors=_state()) as saver:
            crossed = _warm(lambda: saver.save_async().result(WAIT_S))
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()
        if other is not None and other.wait(WAIT_S) != 0:
            raise RuntimeError("rank 1 failed")
    return crossed


def _load(spec: PathSpec) -> Crossed:
    with asyncckpt.Saver(path=spec.directory, tensors=_state()) as saver:
        saver.save()
    return _warm(asyncckpt.Loader(spec.directory, tensors=_state()).load)


def _chain(spec: PathSpec) -> Crossed:
    table = _table()
    with asyncckpt.Saver(path=spec.directory, hashtables={"users": table}, tensors=_state()) as saver:
        saver.save()
        table.lookup(torch.arange(500, 1100))
        saver.save(kind="delta")
    return _warm(asyncckpt.Loader(spec.directory, hashtables={"users": _table()}, tensors=_state()).load)


CASES: dict[str, Callable[[PathSpec], Crossed]] = {
    "save": _save,
    "delta": _delta,
    "ranks": _ranks,
    "load": _load,
    "chain": _chain,
}


def _warm(function: Callable[[], object], *, train: Callable[[], object] = lambda: None) -> Crossed:
    """The path of a call after two others; what training does before each call is no part of it.

    The shortest one of several: where other processes have the cores, a thread waits for another one now and then.
    """
    found = []
    for number in range(2 + MEASURED):
        train()
        crossed = Crossed()
        with crossed.watching() if number >= 2 else nullcontext():
            function()
        _wait_for_threads(set())
        found.append(crossed)
    return min(found[2:], key=lambda crossed: sum(map(len, crossed.functions().values())))


# -- the report --------------------------------------------------------------------------------------------------------


def run_path(
    *, directory: Path | None = None, out: Path, names: bool = False, smoke: bool = False
) -> dict[str, dict[str, list[str]]]:
    """Run the cases, print the tables, write `out`.json and .txt; return {case: {file: functions}}."""
    found = {}
    for case in ("save", "chain") if smoke else CASES:
        with scratch_folder(directory) as folder:
            spec = PathSpec(figures_path=str(folder / "figures"), directory=str(folder / "saved"), case=case)
            Path(spec.directory).mkdir()
            found[case], _ = run_child("bench.path", asdict(spec))
    console = make_console()
    rows = []
    for case, files in found.items():
        lines_count = sum(len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in files)
        functions_count = sum(map(len, files.values()))
        rows.append([case, *map(str, (len(files), GOALS[case], functions_count, lines_count))])
    columns = ["", "files", "goal", "functions", "lines of the files"]
    print_table(console, "files and functions crossed (ranks: by rank 0)", columns, rows)
    rooms = {case: Counter(map(_room, files)) for case, files in found.items()}
    rows = [[room, *(str(rooms[case][room]) for case in found)] for room in sorted(set().union(*rooms.values()))]
    print_table(console, "files by room", ["", *found], rows)
    if names:
        listed = sorted(set().union(*found.values()))
        rows = [[file, *(str(len(found[case].get(file, ())) or "") for case in found)] for file in listed]
        print_table(console, "functions by file", ["", *found], rows)
    write_json(Path(f"{out}.json"), {"goals": GOALS, "cases": found})
    console.save_text(f"{out}.txt")
    return found


def _room(file: str) -> str:
    return Path(file).parts[0].removesuffix(".py")


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        spec = PathSpec(**json.loads(sys.argv[1]))
        torch.set_num_threads(1)
        crossed = CASES[spec.case](spec)
        Path(spec.figures_path).write_text(json.dumps(crossed.functions()))
        return
    from bench.__main__ import application

    application(["path", *sys.argv[1:]])


if __name__ == "__main__":
    main()
