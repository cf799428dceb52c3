"""Garbage that is collected where a lock is held: finalizers wait for nobody, destructors get an answer or an error.

collected_scenes.py says what is collected, and where.
"""

from __future__ import annotations

import ast
import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from asyncckpt.errors import UsageError
from asyncckpt.signals import Guard, check_holds_none
from tests.ranks.forked import REPOSITORY
from tests.worlds.threads import in_thread

DEADLINE_S = 600.0
# Locks that are no guards, and why.
OTHERS = {
    "signals.py": "a guard is made of one",
    "commit/retention.py": "taken on threads on which nothing else runs; renewed in children",
    "tables/table_lock.py": "any thread may release it; refused on the thread that holds it, renewed in children",
    "engine/process/save_lock.py": "re-entrant, and only a list of callers is changed under it",
    "observe/serve.py": "one look at a directory at a time, by the server's threads alone",
    "system.py": "where there is no pread (Windows), around two system calls; no finalizer reads or writes so",
    "tables/undo_log.py": "taken only by who holds the table, and by the background; no child uses it",
}


def play(kind: str, folder: Path, every: int) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.interrupts.collected_scenes", kind, str(folder), str(every)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    folder.chmod(0o750)
    run = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert run.returncode == 0, run.stderr[-6000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_no_finalizer_waits_for_a_lock_that_its_thread_holds(tmp_path: Path, every: int) -> None:
    found = play("finalizers", tmp_path, every)
    assert found["deadlocks"] == found["found"] == []
    assert len(found["reached"]) >= 40 // every, "the scenes take fewer locks than they did"


@pytest.mark.parametrize("every", [8, pytest.param(2, marks=pytest.mark.slow)])
def test_a_destructor_calls_everything_where_a_lock_is_held(tmp_path: Path, every: int) -> None:
    found = play("destructors", tmp_path, every)
    assert found["deadlocks"] == found["found"] == []
    started_count = sum(place.startswith("new asyncckpt-") for place in found["reached"])
    assert started_count >= (5 if every == 2 else 2), (
        "the threads of the pools"
    )  # Of every eighth, it depends on which.
    assert len(found["reached"]) >= 40 // every, "the scenes take fewer locks than they did"


def test_a_finalizer_that_takes_its_lock_like_others_is_found(tmp_path: Path) -> None:
    found = play("control", tmp_path, 1)
    assert any("owner_lock.py" in deadlock for deadlock in found["deadlocks"])


def test_every_lock_of_the_library_is_a_guard() -> None:
    """Or is listed with the reason why it need not be."""
    package = REPOSITORY / "asyncckpt"
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            made, given = ast.unparse(node.func), " ".join(ast.unparse(argument) for argument in node.args)
            is_lock = made in ("threading.Lock", "threading.RLock")
            if is_lock or (made == "threading.Condition" and "guard" not in given):
                found.add(path.relative_to(package).as_posix())
    assert found == OTHERS.keys()


def test_a_guard_is_refused_to_the_thread_that_holds_it() -> None:
    guard, other = Guard(), Guard()
    with guard:
        with pytest.raises(UsageError, match="in the middle of a call on the same thread"):
            guard.__enter__()
        with guard.again(), other:
            pass
        with pytest.raises(UsageError, match="waiting for a save in the middle of another call may have no end"):
            check_holds_none("a save")
        check_holds_none("a save", but=guard)
        assert not in_thread(lambda: guard.acquire(blocking=False))
        assert in_thread(lambda: check_holds_none("a save")) is None
    assert not guard.is_held_here()
    check_holds_none("a save")
    assert in_thread(lambda: guard.acquire(blocking=False))


def test_a_guard_that_is_gone_is_not_asked() -> None:
    guard = Guard()
    guard.acquire()
    del guard
    gc.collect()
    check_holds_none("a save")


def test_an_interrupt_behind_the_lock_does_not_leave_it_held() -> None:
    class Interrupted(Guard):  # type: ignore[misc]
        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            super().acquire(blocking, timeout)
            raise KeyboardInterrupt

    guard = Interrupted()
    with pytest.raises(KeyboardInterrupt), guard:
        pass
    assert not guard.is_held_here()


def test_guards_are_free_in_a_forked_child() -> None:
    guard, held, may_end = Guard(), threading.Event(), threading.Event()

    def hold() -> None:
        with guard:
            held.set()
            may_end.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if guard.acquire(blocking=False) else 1)
    may_end.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
