"""The interpreter's switch interval is short while a save or load is in flight, and the user's own afterwards."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.engine.process.save_lock import HANDOVER_S_MAX, Handovers
from asyncckpt.model.write_block import WriteBlock
from tests.worlds.gates import Gate
from tests.worlds.objects import Stateful

USUAL_S = 0.005


@pytest.fixture(autouse=True)
def usual_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(USUAL_S)
    yield
    sys.setswitchinterval(before)


def intervals_during_a_save(path: Path, *, set_to: float | None = None) -> list[float]:
    seen: list[float] = []

    def look(blocks: list[WriteBlock]) -> list[WriteBlock]:
        seen.append(sys.getswitchinterval())
        if set_to is not None:
            sys.setswitchinterval(set_to)
        return blocks

    with asyncckpt.Saver(path=path, tensors={"x": torch.zeros(3)}, filter_func=look) as saver:
        saver.save_async(1).result(60)
        seen.append(sys.getswitchinterval())
    return seen


def test_it_is_short_during_a_save(tmp_path: Path) -> None:
    assert intervals_during_a_save(tmp_path) == pytest.approx([HANDOVER_S_MAX, USUAL_S])


@pytest.mark.parametrize("kind", ["save_async", "save", "load"])
def test_it_is_short_in_the_call(tmp_path: Path, kind: str) -> None:
    seen: list[float] = []

    def look() -> None:
        seen.append(sys.getswitchinterval())

    state = {"object": Stateful({"x": 1}, saving=look, loading=look)}
    with asyncckpt.Saver(path=tmp_path, tensors=state) as saver:
        saver.save(1)
        seen.clear()
        if kind == "load":
            asyncckpt.Loader(tmp_path, tensors=state).load()
        else:
            saver.save_async(2).result(60) if kind == "save_async" else saver.save(2)
        assert len(seen) > 0
        assert seen == pytest.approx([HANDOVER_S_MAX] * len(seen))
        assert sys.getswitchinterval() == pytest.approx(USUAL_S)


def test_it_is_short_until_the_last_one_in_flight_ends(tmp_path: Path) -> None:
    may_end, seen = threading.Event(), []

    def wait(blocks: list[WriteBlock]) -> list[WriteBlock]:
        assert may_end.wait(60)
        seen.append(sys.getswitchinterval())
        return blocks

    tensors = {"x": torch.zeros(3)}
    with (
        asyncckpt.Saver(path=tmp_path / "a", tensors=tensors, on_busy="queue") as first,
        asyncckpt.Saver(path=tmp_path / "b", tensors=tensors, on_busy="queue", filter_func=wait) as second,
    ):
        futures = [first.save_async(1), second.save_async(1)]
        futures[0].result(60)
        seen.append(sys.getswitchinterval())
        may_end.set()
        futures[1].result(60)
        seen.append(sys.getswitchinterval())
    assert seen == pytest.approx([HANDOVER_S_MAX, HANDOVER_S_MAX, USUAL_S])


def test_a_skipped_or_refused_call_leaves_it(tmp_path: Path) -> None:
    gate = Gate()
    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.zeros(3)}, filter_func=gate) as saver:
        future = saver.save_async(1)
        assert saver.save_async(2, on_busy="skip").result(60).skipped
        with pytest.raises(asyncckpt.SaveInProgressError):
            saver.save_async(2, on_busy="raise")
        assert sys.getswitchinterval() == pytest.approx(HANDOVER_S_MAX)
        gate.open()
        future.result(60)
        assert sys.getswitchinterval() == pytest.approx(USUAL_S)


def test_what_the_user_sets_meanwhile_stays(tmp_path: Path) -> None:
    assert intervals_during_a_save(tmp_path, set_to=0.02) == pytest.approx([HANDOVER_S_MAX, 0.02])


def test_a_shorter_one_stays(tmp_path: Path) -> None:
    sys.setswitchinterval(0.0001)
    assert intervals_during_a_save(tmp_path) == pytest.approx([0.0001, 0.0001])


def test_a_forked_child_has_the_usual_one(tmp_path: Path) -> None:
    codes: list[int] = []

    def fork(blocks: list[WriteBlock]) -> list[WriteBlock]:
        child = os.fork()
        if child == 0:
            os._exit(0 if abs(sys.getswitchinterval() - USUAL_S) < 1e-6 else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return blocks

    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.zeros(3)}, filter_func=fork) as saver:
        saver.save_async(1).result(60)
    assert codes == [0]


def test_a_child_forked_at_any_instruction_has_the_usual_one() -> None:
    handovers, left = Handovers(), []

    def fork(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != Handovers.shorten.__code__.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            child = os.fork()
            if child == 0:
                sys.settrace(None)
                handovers.give_back()
                os._exit(0 if abs(sys.getswitchinterval() - USUAL_S) < 1e-6 else 1)
            left.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return fork

    before = sys.gettrace()
    sys.settrace(fork)
    try:
        handovers.shorten()
        handovers.give_back()
    finally:
        sys.settrace(before)
    assert len(left) > 20
    assert not any(left)


def test_it_is_exactly_what_it_was() -> None:
    handovers = Handovers()
    for number in range(210, 20_000, 10):
        sys.setswitchinterval((number + 0.5) * 1e-6)
        before = sys.getswitchinterval()
        handovers.shorten()
        handovers.give_back()
        assert sys.getswitchinterval() == before


def test_a_failed_save_gives_it_back(tmp_path: Path) -> None:
    def fail(blocks: list[WriteBlock]) -> list[WriteBlock]:
        raise ValueError("no")

    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.zeros(3)}, filter_func=fail) as saver:
        with pytest.raises(asyncckpt.errors.FilterError):
            saver.save_async(1).result(60)
        assert sys.getswitchinterval() == pytest.approx(USUAL_S)
