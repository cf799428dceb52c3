"""Saves and loads with one disturbed operation each, many in one child: nothing dies here, so leaks add up and show.

A batch takes operations of a save in turn. After each run, with the fault gone: the error is one of the library's,
the disk has the old checkpoint or the new one, saving goes on with the same Saver, and no descriptor or thread is left.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from child_runs import copy_template
from fork_server import Channel
from op_log import DiskOp, read_log
from oracle import (
    check_load,
    check_no_leftovers,
    check_standing,
    check_steps,
    expected_digest,
    is_done,
    listed_steps,
    tree_of,
)
from sample_state import SampleState
from scenarios import AFTER_STEP, CHECKPOINT, NEW_STEP, Scenario
from shim import ALL_KINDS, CHANGING_KINDS, NOTHING, Action, DiskFault, OpKind, Shim

from asyncckpt import CheckpointError, CorruptError, IndeterminateError, IOFailedError, Saver
from tests.shares import share_of
from tests.worlds.told import check_told

THREAD_END_SECONDS_MAX = 20.0
SAVED, LOADED = "saved all the same", "loaded all the same"
WRONG_MAX = 5  # A batch stops after this many.
# Operations at which an action does something that failing does not do already.
KINDS_OF_ACTION = {
    Action.FAIL: ALL_KINDS,
    Action.LIE: CHANGING_KINDS,
    Action.SHORT: frozenset({OpKind.READ, OpKind.WRITE}),
    Action.ZERO: frozenset({OpKind.READ, OpKind.WRITE}),
}


@dataclass
class BatchReport:
    """How the runs of a batch ended, and what was wrong with some."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def disturb_saves(
    channel: Channel, scenario: Scenario, folder: Path, template: Path, fault: DiskFault, every: int
) -> None:
    """Put the fault (its `at` does not count) at a share of the operations of a save. Sends a BatchReport."""
    report = BatchReport()
    operations = _operations_of_a_save(scenario, folder, template)
    written = {operation.path for operation in operations if operation.kind is OpKind.CREATE}
    threads_count = _threads_count()
    meant = [one for one in operations if one.kind in KINDS_OF_ACTION[fault.action]]
    for operation in share_of(meant, f"{scenario.name} {fault.name}", every=every, by=lambda one: one.kind):
        run = folder / str(operation.number)
        copy_template(template, run)
        try:
            outcome = _disturb_save(scenario, run, replace(fault, at=operation.number))
            report.outcomes[outcome] += 1
            is_told = outcome != SAVED or operation.path not in written or not _must_be_told(operation, fault)
            assert is_told, "the save tells nothing of the failure"
        except Exception:
            report.wrong.append(f"{fault.name} at {operation}: {traceback.format_exc()}")
            if len(report.wrong) == WRONG_MAX:
                break
    _wait_for_native_threads(threads_count)
    channel.send(report)


def disturb_loads(channel: Channel, folder: Path, template: Path, fault: DiskFault) -> None:
    """Put the fault at every operation of a load, one run each. Sends a BatchReport."""
    report = BatchReport()
    copy_template(template, folder / "load")
    root = folder / "load" / CHECKPOINT
    before = tree_of(root)
    _disturb_load(root, NOTHING)  # The first load of a process opens files of Python's own.
    at, was_hit = 0, True
    while was_hit and len(report.wrong) < WRONG_MAX:
        try:
            outcome, was_hit = _disturb_load(root, replace(fault, at=at))
            report.outcomes[outcome] += was_hit
            assert tree_of(root) == before, "a load changed the directory"
        except Exception:
            report.wrong.append(f"{fault.name} at operation {at} of a load: {traceback.format_exc()}")
        at += 1
    channel.send(report)


def _operations_of_a_save(scenario: Scenario, folder: Path, template: Path) -> list[DiskOp]:
    run = folder / "trial"
    copy_template(template, run)
    log = os.open(f"{run}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    state = SampleState()
    try:
        with scenario.open_watched(run, state, log=log, tell=Shim().mark) as saver:
            scenario.disturbed(saver, state)
    finally:
        Shim().disarm()
        os.close(log)
    _wait_for_threads()
    log = read_log(Path(f"{run}.log"))
    return log[scenario.begin_of_disturbed(log) :]


def _disturb_save(scenario: Scenario, folder: Path, fault: DiskFault) -> str:
    root, state, shim = folder / CHECKPOINT, SampleState(), Shim()
    open_before = _open_files()
    saver: Saver | None = None
    error: CheckpointError | None = None
    acknowledged = False
    try:
        saver = scenario.open_watched(folder, state, fault)
        scenario.disturbed(saver, state)
        acknowledged = True
        saver.close()
        saver = None
    except CheckpointError as raised:
        error = raised
    finally:
        _wait_for_threads()
        hits_count = shim.hits_count
        shim.disarm()
    assert hits_count > 0, "the operation was not reached"
    outcome = _check_outcome(scenario, root, fault, error, acknowledged=acknowledged)
    _go_on(scenario, root, saver, state, is_known=not isinstance(error, IndeterminateError))
    _wait_for_threads()
    assert _open_files() == open_before, "descriptors are left open"
    return outcome


def _check_outcome(
    scenario: Scenario, root: Path, fault: DiskFault, error: CheckpointError | None, *, acknowledged: bool
) -> str:
    newest = NEW_STEP if acknowledged else max(scenario.standing, default=None)
    check_standing(scenario, check_steps(root, acknowledged=newest, candidates={*scenario.standing, NEW_STEP}))
    if error is None:
        return SAVED
    is_there = is_done(scenario, root)
    if isinstance(error, IndeterminateError):
        assert error.resolve() == is_there
        return f"indeterminate, {'there' if is_there else 'absent'}"
    # To whoever reads, a file of which nothing comes is a damaged one.
    is_empty_read = scenario.act == "compact" and fault.action is Action.ZERO and isinstance(error, CorruptError)
    assert is_empty_read or isinstance(error, IOFailedError), f"raised {error!r}"
    assert not is_there, f"a save that failed with {error!r} is there"
    if fault.error:
        assert isinstance(error, IOFailedError)
        assert error.errno == fault.error, f"{error!r} has errno {error.errno}"
    _check_told(error, root)
    return "failed"


def _check_told(error: CheckpointError, root: Path) -> None:
    """An error of a disk says where, what was wanted, why it was refused, and what to do."""
    is_refused = isinstance(error, IOFailedError) and error.errno
    why = os.strerror(error.errno) if isinstance(error, IOFailedError) and error.errno else ""
    check_told(error, "disk", f"{root.parent}", why, is_mended=not is_refused, shown={f"{root}": "DIR"})


def _must_be_told(operation: DiskOp, fault: DiskFault) -> bool:
    """Whether a save cannot be good after this: bytes were refused, or reported lost when their file was closed."""
    is_failure = fault.action in (Action.FAIL, Action.LIE) and fault.error != errno.EINTR
    is_written = operation.name.endswith(".safetensors") or operation.name.startswith(".m-")
    return is_failure and is_written and operation.kind in (OpKind.CREATE, OpKind.WRITE, OpKind.TRUNCATE, OpKind.CLOSE)


def _go_on(scenario: Scenario, root: Path, saver: Saver | None, state: SampleState, *, is_known: bool) -> None:
    """The fault is gone: the same Saver saves again, the same step if it failed. A new one if the outcome is open."""
    if saver is not None and not is_known:
        saver.close()
        saver = None
    with saver if saver is not None else scenario.open(root, state) as saver:
        if scenario.act == "compact" and not is_done(scenario, root):
            assert scenario.disturbed(saver, state).step == NEW_STEP
            check_load(root, NEW_STEP, newest=True)
        step = AFTER_STEP if NEW_STEP in listed_steps(root) else NEW_STEP
        assert scenario.save(saver, state, step).step == step
    check_load(root, step, newest=True)
    check_no_leftovers(root)


def _disturb_load(root: Path, fault: DiskFault) -> tuple[str, bool]:
    """Returns how the load ended, and whether the operation was reached."""
    state, shim = SampleState(), Shim()
    open_before = _open_files()
    shim.arm(root.parent, fault)
    error: CheckpointError | None = None
    try:
        step = state.load(root)
    except CheckpointError as raised:
        error = raised
    finally:
        hits_count = shim.hits_count
        shim.disarm()
    if error is None:
        assert state.digest() == expected_digest(step), "a load gives something else than was saved"
    elif fault.error:
        assert isinstance(error, IOFailedError), f"raised {error!r}"
        assert error.errno == fault.error, f"{error!r} has errno {error.errno}"
    if error is not None:
        _check_told(error, root)
    outcome = LOADED if error is None else type(error).__name__
    step = state.load(root)
    assert state.digest() == expected_digest(step), "a load after a failed one gives something else"
    assert _open_files() == open_before, "descriptors are left open"
    return outcome, hits_count > 0


def _wait_for_threads() -> None:
    """The library's threads end when they have nothing to do; one that stays is a leak."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(THREAD_END_SECONDS_MAX)
            assert not thread.is_alive(), f"thread {thread.name} is left"


def _wait_for_native_threads(expected_count: int) -> None:
    """A joined thread is listed by the system for a moment yet; nothing tells when it is gone."""
    until = time.monotonic() + THREAD_END_SECONDS_MAX
    while _threads_count() > expected_count and time.monotonic() < until:
        os.sched_yield()
    assert _threads_count() <= expected_count, "threads are left"


def _threads_count() -> int:
    return len(os.listdir("/proc/self/task"))


def _open_files() -> dict[str, str]:
    """Every open descriptor with what it is open for."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # The descriptor of the listing itself.
    return found
