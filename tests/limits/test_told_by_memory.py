"""Where memory for staging or loading cannot be had, the error or the warning says for what, how much was wanted, how
much there was, and what to change.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import asyncckpt
from asyncckpt.engine.process import log
from asyncckpt.staging import limits
from asyncckpt.staging.pool import Arena, pool
from tests.shares import share_of
from tests.worlds.arenas import close_free
from tests.worlds.gates import Gate
from tests.worlds.told import check_told

WAIT_S_MAX = 60.0
WANTED = re.compile(r"\b\d{4,} bytes|\d [MGTPE]iB")
THE_LIMIT = re.compile(r"host memory limit \((\d+ bytes|\d+% of the \d+ bytes to spare)\)")
TO_SPARE = re.compile(r"\d+ bytes are to spare")
State = dict[str, Any]


def state() -> State:
    return {"weight": torch.ones(1_000_000)}


def tables() -> dict[str, asyncckpt.HashTable]:
    table = asyncckpt.HashTable("t", 8)
    table.insert(torch.arange(4000), torch.ones(4000, 8))
    return {"t": table}


@contextmanager
def nothing_can_be_mapped() -> Any:
    """An arena asks the system for more than any has, and gets its own refusal."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Arena, "_resize", lambda self, bytes, reserve: self._memory.resize(1 << 60))
        yield


@contextmanager
def little_is_available() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        little = psutil.virtual_memory()._replace(available=500_000)
        patched.setattr(psutil, "virtual_memory", lambda: little)
        yield


@contextmanager
def a_cgroup_leaves_little() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(limits, "cgroup_free_bytes", lambda: 700_000)
        yield


@contextmanager
def chunks_cannot_be_made() -> Any:
    """What is allocated while files are written."""

    def refuse(*_: object, **__: object) -> None:
        raise np._core._exceptions._ArrayMemoryError((5_000_000,), np.dtype(np.uint8))  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("asyncckpt.engine.save.run_save.write_files", refuse)
        yield


LACKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing can be mapped": nothing_can_be_mapped,
    "little is available": little_is_available,
    "a cgroup leaves little": a_cgroup_leaves_little,
    "chunks cannot be made": chunks_cannot_be_made,
}


def save_async(path: Path, **options: Any) -> None:
    with asyncckpt.Saver(path=path, tensors=state(), hashtables=tables(), **options) as saver:
        saver.save_async(3).result(WAIT_S_MAX)


def prepare(path: Path) -> None:
    with asyncckpt.Saver(path=path, tensors=state()) as saver:
        saver.prepare().result(WAIT_S_MAX)


def save_by_steps(path: Path) -> None:
    with asyncckpt.Checkpointer(path, every=1, **state()) as ckpt:
        ckpt.restore()
        ckpt.step(3)


CALLS: dict[str, Callable[[Path], None]] = {
    "save_async": save_async,
    "save_async, limited": lambda path: save_async(path, host_memory_limit=600_000),
    "prepare": prepare,
    "step": save_by_steps,
}


def told_of(call: Callable[[Path], None], path: Path, caplog: pytest.LogCaptureFixture) -> list[Any]:
    """Return what a call raises, warns of and logs."""
    caplog.clear()
    told: list[Any] = []
    close_free(pool)
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.WARNING, "asyncckpt"):
        warnings.simplefilter("always")
        try:
            call(path)
        except asyncckpt.CheckpointError as error:
            told.append(error)
    told += [str(one.message) for one in caught]
    return [*told, *(record.getMessage() for record in caplog.records)]


CASES = [(call, lack) for call in CALLS for lack in LACKS]


@pytest.mark.parametrize(("name", "lack"), share_of(CASES, "lacks of memory", by=lambda case: case[0]))
def test_a_lack_of_memory_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str, lack: str
) -> None:
    monkeypatch.setattr(log, "OFTEN_S", 0.0)
    path = tmp_path / "ckpt"
    with LACKS[lack]():
        told = told_of(CALLS[name], path, caplog)
    is_needed = (name, lack) not in {("prepare", found) for found in LACKS if found != "nothing can be mapped"}
    assert bool(told) == is_needed, told
    for one in told:
        where = () if isinstance(one, str) and one.startswith("asyncckpt: ") else (str(path),)  # A warning has a line.
        there = THE_LIMIT if "does not fit" in str(one) else TO_SPARE
        check_told(one, "memory", WANTED, there, *where, shown={str(path): "DIR"})


def test_arenas_that_are_in_use_are_told(tmp_path: Path, gate: Gate) -> None:
    busy = asyncckpt.BusyPolicy("queue", deadline=0.05)
    with asyncckpt.Saver(path=tmp_path, tensors=state(), filter_func=gate, on_busy=busy) as saver:
        futures = [saver.save_async(step) for step in range(2)]
        with pytest.raises(asyncckpt.DeadlineError) as raised:
            saver.save_async(2)
        gate.open()
        assert [future.result(WAIT_S_MAX).step for future in futures] == [0, 1]
    check_told(raised.value, "memory", "within 0.05 s", "found 2")


def test_room_for_growing_tables_that_is_not_made_ready_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, arena: Arena, *_: Any, **__: Any) -> None:
        arena._memory.resize(1 << 60)

    monkeypatch.setattr(type(pool), "touch_ahead", refuse)
    for line in told_of(save_async, tmp_path / "ckpt", caplog):
        check_told(line, "memory", str(tmp_path), WANTED, is_mended=True, shown={str(tmp_path): "DIR"})
