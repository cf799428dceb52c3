"""Whoever is called by the library may call it: every public function answers there, or raises an error of ours soon.

What is called back: done callbacks, filters, objects of the state, tables, log handlers; and, as Python does it, signal
handlers and coroutines. Each tries all of public_calls.py, one after the other. Afterwards nothing is held.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import asyncckpt
import asyncckpt.embcache
from asyncckpt import saver as saver_module
from asyncckpt.commit.attempt import claims
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.engine.save import start_save
from asyncckpt.staging.pool import ArenaState, pool
from asyncckpt.tables import table_lock
from tests.interrupts.public_calls import DEADLINE_S, SavedSteps, calls
from tests.worlds.gates import Gate
from tests.worlds.objects import Stateful

AT_ONCE_S = 8.0  # Far below the deadlines of the waits, far above what a slow machine needs.
ONES = {"a": torch.ones(3)}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Everything:
    """Makes all calls, the first time that it is called; keeps what came of each."""

    def __init__(self, world: SavedSteps) -> None:
        self.world = world
        self.answers: dict[str, tuple[BaseException | None, float]] = {}
        self._begun = False

    def __call__(self, given: Any = None, *_: Any) -> Any:
        if not self._begun:
            self._begun = True
            for name, call in calls(self.world).items():
                self.answers[name] = try_one(call)
        return given

    def check(self) -> None:
        assert self.answers.keys() == calls(self.world).keys(), "it was not called, or did not come to its end"
        wrong = {name: repr(error) for name, (error, _) in self.answers.items() if not is_ours(error)}
        assert wrong == {}
        slow = {name: (seconds, repr(error)) for name, (error, seconds) in self.answers.items() if seconds > AT_ONCE_S}
        assert slow == {}


def try_one(call: Callable[[], Any]) -> tuple[BaseException | None, float]:
    begun = time.monotonic()
    error = None
    try:
        call()
    except BaseException as raised:
        error = raised
    return error, time.monotonic() - begun


def is_ours(error: BaseException | None) -> bool:
    """DCP puts errors into one of its own."""
    if isinstance(error, CheckpointException):
        return all(isinstance(failure[0], asyncckpt.CheckpointError) for failure in error.failures.values())
    return error is None or isinstance(error, asyncckpt.CheckpointError)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SavedSteps]:
    for module in (saver_module, start_save):
        monkeypatch.setattr(module, "SAVE_DEADLINE_S", DEADLINE_S)
    monkeypatch.setattr(table_lock, "TABLE_WAIT_S_MAX", DEADLINE_S)
    made = SavedSteps(tmp_path)
    yield made
    made.close()


@pytest.fixture
def everything(world: SavedSteps) -> Iterator[Everything]:
    made = Everything(world)
    yield made
    made.check()
    last_save_commits(world)


def last_save_commits(world: SavedSteps) -> None:
    """Nothing is held, and a new Saver of the same directory saves what a Loader loads."""
    world.close()
    until = time.monotonic() + DEADLINE_S
    while save_lock.in_flight() and time.monotonic() < until:  # What a call began in the background.
        time.sleep(0.01)
    assert save_lock.in_flight() == []
    with asyncckpt.Saver(path=world.run, tensors={"x": torch.arange(4.0)}, hashtables={"t": world.table}) as saver:
        step = saver.save_async().result(DEADLINE_S).step
    assert claims.held == {}
    assert [arena.state for arena in pool._arenas if arena.state is not ArenaState.FREE] == []
    target = {"x": torch.zeros(4)}
    table = asyncckpt.HashTable("t", 2)
    assert asyncckpt.Loader(world.run, tensors=target, hashtables={"t": table}).load().step == step
    assert torch.equal(target["x"], torch.arange(4.0))
    assert len(table) == len(world.table)


def saver_with(world: SavedSteps, **options: Any) -> asyncckpt.Saver:
    return asyncckpt.Saver(path=world.path / "calling", **options)


def test_a_done_callback_calls_everything(world: SavedSteps, everything: Everything) -> None:
    gate, ended = Gate(), threading.Event()

    def callback(_: Any) -> None:
        everything()
        ended.set()

    with saver_with(world, tensors=world.state, filter_func=gate) as saver:
        future = saver.save_async(1)
        future.add_done_callback(callback)
        gate.open()
        assert ended.wait(10 * DEADLINE_S)


@pytest.mark.parametrize("call", ["save_async", "save"])
def test_a_filter_function_calls_everything(world: SavedSteps, everything: Everything, call: str) -> None:
    with saver_with(world, tensors=world.state, filter_func=everything) as saver:
        getattr(saver, call)(1)


def test_a_row_filter_calls_everything(world: SavedSteps, everything: Everything) -> None:
    def keep(columns: Any) -> torch.Tensor:
        everything()
        return torch.ones(len(columns["id"]), dtype=torch.bool)

    filters = [asyncckpt.filters.keep_rows("t", keep)]
    with saver_with(world, hashtables={"t": world.table}, filters=filters) as saver:
        saver.save_async(1).result(10 * DEADLINE_S)


@pytest.mark.parametrize("call", ["load", "load_async"])
def test_a_load_filter_calls_everything(world: SavedSteps, everything: Everything, call: str) -> None:
    loader = asyncckpt.Loader(world.run, tensors={"x": torch.zeros(4)}, step=0, filter_func=everything, strict=False)
    loaded = getattr(loader, call)()
    assert call == "load" or loaded.result(10 * DEADLINE_S)


@pytest.mark.parametrize("call", ["save_async", "save"])
def test_a_state_dict_calls_everything(world: SavedSteps, everything: Everything, call: str) -> None:
    with saver_with(world, tensors={"o": Stateful(ONES, saving=everything)}) as saver:
        getattr(saver, call)(1)
    assert asyncckpt.list_steps(world.path / "calling") == [1]


@pytest.mark.parametrize("call", ["load", "load_async"])
def test_a_load_state_dict_calls_everything(world: SavedSteps, everything: Everything, call: str) -> None:
    with saver_with(world, tensors={"o": Stateful(ONES)}) as saver:
        saver.save(1)
    loaded = getattr(asyncckpt.Loader(saver.path, tensors={"o": Stateful(ONES, loading=everything)}), call)()
    assert call == "load" or loaded.result(10 * DEADLINE_S)


class CallingTable(asyncckpt.HashTable):
    """Calls out wherever the library calls it; what it calls uses itself, too."""

    call_out: Callable[[], Any] = int
    at = ""

    def begin_cut(self) -> Any:
        cut = super().begin_cut()
        if self.at == "begin_cut":
            self.call_out()
        return cut

    def begin_load(self, **options: Any) -> Any:
        load = super().begin_load(**options)
        if self.at == "begin_load":
            self.call_out()
        return load

    def schema(self) -> Any:
        if self.at == "schema":
            self.call_out()
        return super().schema()


@pytest.mark.parametrize("call", ["save_async", "save"])
def test_a_table_that_is_cut_calls_everything(world: SavedSteps, everything: Everything, call: str) -> None:
    world.table = table = CallingTable("t", 2)
    table.call_out, table.at = everything, "begin_cut"
    with saver_with(world, hashtables={"t": table}) as saver:
        getattr(saver, call)(1)


@pytest.mark.parametrize("call", ["load", "load_async"])
def test_a_table_that_is_loaded_calls_everything(world: SavedSteps, everything: Everything, call: str) -> None:
    world.table = table = CallingTable("t", 2)
    table.call_out, table.at = everything, "begin_load"
    loaded = getattr(asyncckpt.Loader(world.run, hashtables={"t": table}, step=0), call)()
    assert call == "load" or loaded.result(10 * DEADLINE_S)


def test_a_table_that_tells_its_schema_calls_everything(world: SavedSteps, everything: Everything) -> None:
    table = CallingTable("t", 2)
    table.call_out, table.at = everything, "schema"
    with saver_with(world, hashtables={"t": table}) as saver:
        saver.save(1)


@pytest.mark.parametrize("call", ["save_async", "save"])
def test_a_signal_handler_in_a_capture_calls_everything(world: SavedSteps, everything: Everything, call: str) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: everything())
    try:
        signalled = Stateful(ONES, saving=lambda: os.kill(os.getpid(), signal.SIGUSR1))
        with saver_with(world, tensors={"o": signalled}) as saver:
            getattr(saver, call)(1)
            assert everything.answers
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_handler_in_a_blocking_save_may_save_behind_it(world: SavedSteps) -> None:
    results = []

    def signal_first(blocks: Any) -> Any:
        if not results:
            os.kill(os.getpid(), signal.SIGUSR1)
            results.append(0)
        return blocks

    with saver_with(world, tensors=world.state, filter_func=signal_first) as saver:
        before = signal.signal(signal.SIGUSR1, lambda *_: results.append(saver.save(2, on_busy="wait").step))
        try:
            assert saver.save(1).step == 1
            assert results == [0, 2]
        finally:
            signal.signal(signal.SIGUSR1, before)


def test_a_signal_handler_in_a_wait_calls_everything(world: SavedSteps, everything: Everything) -> None:
    """The wait is for a save that goes on meanwhile."""
    ended = threading.Event()

    def handler(*_: Any) -> None:
        try:
            everything()
        finally:
            ended.set()

    def signal_first(blocks: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return blocks

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with saver_with(world, tensors=world.state, filter_func=signal_first) as saver:
            assert saver.save_async(1).result(20 * DEADLINE_S).step == 1
            assert ended.wait(DEADLINE_S)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_log_handler_calls_everything(world: SavedSteps, everything: Everything) -> None:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            everything()

    handler, log = Handler(), logging.getLogger("asyncckpt")
    log.addHandler(handler)
    try:
        with saver_with(world, tensors=world.state) as saver:
            future = saver.save_async(1)
            future.add_done_callback(lambda _: 1 / 0)  # That is logged.
            future.result(10 * DEADLINE_S)
            until = time.monotonic() + 10 * DEADLINE_S
            while len(everything.answers) < len(calls(world)) and time.monotonic() < until:
                time.sleep(0.01)
    finally:
        log.removeHandler(handler)


def test_a_coroutine_calls_everything(world: SavedSteps, everything: Everything) -> None:
    """While it awaits a save, on the loop of the caller."""

    async def both() -> None:
        with saver_with(world, tensors=world.state) as saver:
            future = saver.save_async(1)
            everything()
            await future

    asyncio.run(both())


def test_a_destructor_calls_everything(world: SavedSteps, everything: Everything) -> None:
    """Of an object that a capture drops; those that the collector finds are in test_collected.py."""

    class Dropped:
        def __del__(self) -> None:
            everything()

    with saver_with(world, tensors={"o": Stateful(ONES, saving=lambda: Dropped() and None)}) as saver:
        saver.save_async(1)


def test_every_public_function_is_called(world: SavedSteps) -> None:
    """So that a new one is tried without a change of the tests above."""
    called = " ".join(calls(world))
    kinds = {
        "Saver": asyncckpt.Saver, "Loader": asyncckpt.Loader, "SaveFuture": asyncckpt.SaveFuture,
        "PeriodicSaver": asyncckpt.PeriodicSaver, "embcache.Saver": asyncckpt.embcache.Saver,
        "Checkpointer": asyncckpt.Checkpointer,
    }  # fmt: skip
    later = {"Saver.close", "embcache.Saver.load"}  # The first closes what the other calls use.
    missing = [
        f"{kind}.{name}"
        for kind, type_ in kinds.items()
        for name, member in inspect.getmembers(type_, inspect.isfunction)
        if not name.startswith("_") and name not in ENGINE_ONLY and f"{kind}.{name}" not in {*called.split(), *later}
    ]
    functions = [
        name for name in asyncckpt.__all__ if inspect.isfunction(getattr(asyncckpt, name)) and name not in called
    ]
    assert (missing, functions) == ([], ["sharded"]), "sharded only describes a tensor"


# Of a future, what the engine and asyncio call.
ENGINE_ONLY = {"enter", "expect_bytes", "resolve", "fail", "end_with", "skip", "expect_copies",
               "expect_upload", "before_done", "mark_staged", "send", "throw", "close"}  # fmt: skip
