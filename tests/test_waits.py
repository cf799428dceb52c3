"""Every wait has a limit: no call in the package waits without a timeout, but for those listed here with their reason.

Read from the source. What waits inside a call of the system or of torch is not seen; `with lock:` is no wait in this
sense, for what is held that way is held for moments.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "asyncckpt"

# Methods that wait for ever when they are called without arguments.
WITHOUT_ARGUMENTS = {"acquire", "wait", "join", "result", "exception", "get"}
# Those that do when they are called without a second argument or a timeout; and an executor's `map`.
WITHOUT_TIMEOUT = {"wait_for", "as_completed"}
# Our own, whose second argument is the limit.
IN_STEPS = {"wait_until_done", "wait_in_steps"}
FUNCTIONS = {"wait", "asyncio.wait", "futures.wait", "concurrent.futures.wait", "as_completed"}

DONE = "it is done: nothing is waited for"
MEMORY = "what runs reads or writes memory that is given back behind this, and waits for nothing but the disk"
SENDING = "requests to a store, each with StoreLimits; they read memory that is given back behind this"
EVENT = "an event of a device: its wait has DEVICE_DEADLINE_S"
ALLOWED = {
    ("coordination/driver.py", "receiving.result()"): DONE,
    ("coordination/driver.py", "task.result()"): DONE,
    ("coordination/driver.py", "task.exception()"): DONE,
    ("coordination/driver.py", "future.exception()"): DONE,
    ("coordination/driver.py", "run.result()"): "no future: the outcome of a call that has ended",
    ("coordination/driver.py", "asyncio.wait({self._writing})"): MEMORY,
    ("coordination/driver.py", "asyncio.wait(self._tasks)"): MEMORY,
    ("coordination/store_address.py", "asked.result()"): DONE,
    ("coordination/store_channel.py", "answer.result()"): DONE,
    ("coordination/store_channel.py", "asked.result()"): DONE,
    ("coordination/store_channel.py", "ready.result()"): DONE,
    ("coordination/rank_store.py", "self.asked.get()"): "a daemon that has nothing to do",
    ("devices/batch.py", "event.wait()"): EVENT,
    ("devices/fetch.py", "event.wait()"): EVENT,
    ("devices/current_runtime.py", "self._runtime.record(self._runtime.current_stream(device)).wait()"): EVENT,
    ("devices/host_copies.py", "runtime.record(batch.stream).wait()"): EVENT,
    ("engine/process/background.py", "woken.wait()"): "the background itself, between jobs that run",
    ("engine/ranks/meeting.py", "answer.result()"): DONE,
    ("engine/features/event_line.py", "queue.get()"): "a daemon that has nothing to do",
    ("follower.py", "asyncio.wait([waiter])"): MEMORY,
    ("follower.py", "waiter.exception()"): DONE,
    ("integrations/lightning_io.py", "future.exception()"): DONE,
    ("loader.py", "streams.wait()"): EVENT,
    ("periodic.py", "future.result()"): DONE,
    ("plan/sharded_leaves.py", "wait()"): "a collective of torch, which has the deadline of its group",
    ("shard/files.py", "sending.exception()"): SENDING,
    ("shard/sent.py", "self._sending.result()"): SENDING,
    ("shard/sent.py", "self._parts.get()"): "the writer of the file, which closes it however it ends",
    ("shard/stream.py", "running.pop().result()"): MEMORY,
    ("snapshot/layer_rows.py", "threads.map(_newest, stacks)"): "work of processors on rows in memory",
    ("snapshot/restore.py", "threads.map(_insert, tables)"): "the same",
    ("signals.py", "wait(max(0.0, min(left, STEP_S)))"): "one step",
    ("storage/object_store.py", "wait_in_steps(look, math.inf)"): "a request to a store, with StoreLimits",
    ("strategies/async_utils.py", "future.exception()"): DONE,
    ("strategies/async_utils.py", "self._ranks.get()"): "no queue: what ranks agree on, with the deadline of a peer",
    ("embcache/ranks.py", "self._agreement.get()"): "the same",
    ("strategies/common_state.py", "running.result()"): "a RunningSave, which has a deadline",
    (
        "strategies/sharded_state.py",
        "self._begin_save(checkpoint_dir, SHARDED_DIR, partial(state_to_save, sharded_state_dict)).result()",
    ): "the same",
    ("tables/levels.py", "landing.wait()"): EVENT,
    ("tables/levels.py", "self.cache.begin_to_host(cached, only=only).wait()"): EVENT,
    ("tables/trained_table.py", "self._level.place.begin_to_host(newest).wait()"): EVENT,
    ("testing/case.py", "use.result()"): DONE,
    ("engine/ranks/rank_save.py", "self.stopped.wait()"): "within asyncio.wait_for",
    ("engine/features/retention.py", "ended.wait()"): "the same",
    ("signals.py", "given_up.acquire()"): "the lock of a condition, which the caller holds for a few lines",
    ("signals.py", "self.acquire()"): "held for a few lines; on the thread that holds it, it does not wait",
}


def is_endless(call: ast.Call) -> bool:
    """Whether a call may be a wait without a limit."""
    if any(keyword.arg in ("timeout", "blocking") for keyword in call.keywords):
        return False
    written, count = ast.unparse(call.func), len(call.args) + len(call.keywords)
    if written in IN_STEPS:
        return ast.unparse(call.args[1]) in ("None", "math.inf")
    if written in FUNCTIONS:
        return count < 2 or (not any(k.arg == "timeout" for k in call.keywords) and len(call.args) < 2)
    if not isinstance(call.func, ast.Attribute):
        return False
    name = call.func.attr
    return (name in WITHOUT_ARGUMENTS and not count) or (name in WITHOUT_TIMEOUT and count < 2) or name == "map"


def endless_waits(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and is_endless(node):
            yield ast.unparse(node)


def test_every_wait_has_a_limit() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), wait)
        for path in PACKAGE.rglob("*.py")
        for wait in endless_waits(path.read_text(encoding="utf-8"))
    }
    assert found - ALLOWED.keys() == set()
    assert ALLOWED.keys() - found == set(), "these are no longer there"


@pytest.mark.parametrize(
    "wait",
    [
        "lock.acquire()",
        "event.wait()",
        "thread.join()",
        "future.result()",
        "future.exception()",
        "queue.get()",
        "condition.wait_for(done)",
        "pool.map(work, items)",
        "asyncio.wait(tasks)",
        "asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)",
        "wait([future])",
        "wait_until_done(future, None)",
        "wait_in_steps(event.wait, math.inf)",
    ],
)
def test_an_endless_wait_is_found(wait: str) -> None:
    assert list(endless_waits(f"async def run():\n    await {wait}")) == [wait]


@pytest.mark.parametrize(
    "wait",
    [
        "lock.acquire(timeout=1)",
        "lock.acquire(blocking=False)",
        "event.wait(1)",
        "', '.join(names)",
        "future.result(0)",
        "found.get(name)",
        "condition.wait_for(done, 1)",
        "asyncio.wait(tasks, timeout=1)",
        "wait([future], 1)",
        "wait_until_done(future, timeout)",
        "map(work, items)",
    ],
)
def test_a_wait_with_a_limit_passes(wait: str) -> None:
    assert list(endless_waits(wait)) == []
