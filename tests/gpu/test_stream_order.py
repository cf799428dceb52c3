"""Every checkpoint holds exactly what was queued before `save_async`, whatever is queued right behind it.

Work that takes long is queued first, so that the host is far ahead of the device: a copy that does not wait, or that
nothing waits for, then holds other values.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.devices.cuda_runtime import CudaRuntime
from tests.gpu.device import (
    DEVICE,
    LONG_CYCLES,
    SHORT_CYCLES,
    current_stream,
    keep_busy,
    new_stream,
    on,
    synchronize,
    wait_for,
)
from tests.gpu.state import CountingState, assert_holds, differences

SCRATCH = [0, 100_000, 4 << 20, 1 << 30]
WAIT_S = 120


def assert_all_hold(path: Path, state: CountingState, steps: dict[int, int]) -> None:
    for step, count in steps.items():
        assert_holds(path, state.expected(count), step=step)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scratch", SCRATCH)
def test_changes_right_before_and_right_after_the_call(tmp_path: Path, scratch: int, seed: int) -> None:
    chosen = random.Random(seed)
    state, steps = CountingState(seed), {}
    with asyncckpt.Saver(
        path=tmp_path,
        tensors=state.tensors,
        device=asyncckpt.DeviceOptions(scratch_bytes=scratch),
        on_busy="queue",
        durability="none",
    ) as saver:
        futures = []
        for step in range(4):
            keep_busy(chosen.choice([SHORT_CYCLES, LONG_CYCLES]))
            state.advance()
            steps[step] = state.steps
            futures.append(saver.save_async(step))
            for _ in range(chosen.randint(1, 3)):
                state.advance()
        for future in futures:
            future.result(WAIT_S)
    assert_all_hold(tmp_path, state, steps)


@pytest.mark.parametrize("scratch", [0, 1 << 30])
def test_the_current_stream_need_not_be_the_default_one(tmp_path: Path, scratch: int) -> None:
    stream = new_stream()
    state, steps = CountingState(1), {}
    wait_for(stream, current_stream())
    with (
        asyncckpt.Saver(
            path=tmp_path, tensors=state.tensors, device=asyncckpt.DeviceOptions(scratch_bytes=scratch)
        ) as saver,
        on(stream),
    ):
        for step in range(3):
            keep_busy()
            state.advance()
            steps[step] = state.steps
            future = saver.save_async(step)
            state.advance()
            future.result(WAIT_S)
    wait_for(current_stream(), stream)
    assert_all_hold(tmp_path, state, steps)


@pytest.mark.parametrize("scratch", [0, 1 << 30])
def test_streams_that_the_saver_is_told_of(tmp_path: Path, scratch: int) -> None:
    """The state is changed on streams other than the one on which save_async is called."""
    told = [new_stream(), new_stream()]
    state, steps = CountingState(2), {}
    halves = list(state.live.values())[::2], list(state.live.values())[1::2]
    with asyncckpt.Saver(
        path=tmp_path,
        tensors=state.tensors,
        device=asyncckpt.DeviceOptions(scratch_bytes=scratch, streams=[s for s in told if s is not None]),
    ) as saver:
        for stream in told:
            wait_for(stream, current_stream())

        def advance() -> None:
            for stream, tensors in zip(told, halves, strict=True):
                with on(stream):
                    keep_busy()
                    for tensor in tensors:
                        tensor.add_(1)
            state.steps += 1

        for step in range(3):
            advance()
            steps[step] = state.steps
            future = saver.save_async(step)
            advance()
            future.result(WAIT_S)
    synchronize()
    assert_all_hold(tmp_path, state, steps)


@pytest.mark.parametrize("scratch", [0, 1 << 30])
def test_other_streams_wait_by_fence(tmp_path: Path, scratch: int) -> None:
    other = new_stream()
    state = CountingState(3)
    with asyncckpt.Saver(
        path=tmp_path, tensors=state.tensors, device=asyncckpt.DeviceOptions(scratch_bytes=scratch)
    ) as saver:
        saver.save_async(0).result(WAIT_S)  # What is made once is made.
        keep_busy()
        state.advance()
        future = saver.save_async(1)
        future.fence(other)
        with on(other):
            state.advance()
        future.result(WAIT_S)
    synchronize()
    assert_all_hold(tmp_path, state, {0: 0, 1: 1})


def test_any_stream_may_change_the_state_after_wait_staged(tmp_path: Path) -> None:
    other = new_stream()
    state = CountingState(4)
    with asyncckpt.Saver(path=tmp_path, tensors=state.tensors) as saver:
        keep_busy()
        state.advance()
        future = saver.save_async(1)
        future.wait_staged(WAIT_S)
        with on(other):
            state.advance()
        future.result(WAIT_S)
    synchronize()
    assert_all_hold(tmp_path, state, {1: 1})


def test_a_blocking_save_follows_what_is_queued(tmp_path: Path) -> None:
    state = CountingState(5)
    with asyncckpt.Saver(path=tmp_path, tensors=state.tensors) as saver:
        keep_busy()
        state.advance()
        saver.save(1)
        state.advance()
    assert_all_hold(tmp_path, state, {1: 1})


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_without_pinned_memory(tmp_path: Path, limit: int, fresh_pool: None) -> None:
    """Slower, and as exact."""
    state, steps = CountingState(6), {}
    with asyncckpt.Saver(
        path=tmp_path, tensors=state.tensors, device=asyncckpt.DeviceOptions(pinned_memory_limit=limit)
    ) as saver:
        for step in range(2):
            keep_busy()
            state.advance()
            steps[step] = state.steps
            future = saver.save_async(step)
            state.advance()
            future.result(WAIT_S)
    assert_all_hold(tmp_path, state, steps)


class Fresh:
    """Gives new tensors at every call, which nobody else holds: as a state that is gathered for its save."""

    def __init__(self, state: CountingState) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return {name: tensor.clone() for name, tensor in self._state.tensors.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("not loaded into")


@pytest.mark.parametrize("scratch", [0, 1 << 30])
def test_memory_that_is_freed_after_the_call_and_used_again(tmp_path: Path, scratch: int) -> None:
    state = CountingState(7)
    with asyncckpt.Saver(
        path=tmp_path, tensors={"x": Fresh(state)}, device=asyncckpt.DeviceOptions(scratch_bytes=scratch)
    ) as saver:
        for step in range(3):
            keep_busy()
            state.advance()
            future = saver.save_async(step)
            # The caching allocator hands the same memory out again, if it was given back too early.
            garbage = [torch.full_like(tensor, 99) for _ in range(2) for tensor in state.live.values()]
            future.result(WAIT_S)
            del garbage
            expected = {f"x.{name}": tensor for name, tensor in state.expected().items()}
            found = {name: torch.zeros_like(tensor) for name, tensor in state.expected().items()}
            asyncckpt.Loader(tmp_path, tensors={"x": found}, step=step).load()
            assert differences({f"x.{name}": tensor for name, tensor in found.items()}, expected) == []


def test_a_save_from_another_thread(tmp_path: Path) -> None:
    """Its current stream is the default one, as that of this thread."""
    state = CountingState(8)
    failures: list[BaseException] = []
    with asyncckpt.Saver(path=tmp_path, tensors=state.tensors) as saver:
        keep_busy()
        state.advance()

        def save() -> None:
            try:
                saver.save_async(1).wait_staged(WAIT_S)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=save)
        thread.start()
        thread.join(WAIT_S)
        state.advance()
    assert not failures
    assert_all_hold(tmp_path, state, {1: 1})


def test_a_cancelled_save_leaves_the_next_one_exact(tmp_path: Path) -> None:
    state = CountingState(9)
    with asyncckpt.Saver(path=tmp_path, tensors=state.tensors, on_busy="queue") as saver:
        keep_busy()
        state.advance()
        first = saver.save_async(1)
        assert first.cancel()
        state.advance()
        assert isinstance(first.exception(WAIT_S), asyncckpt.SaveCancelledError)
        second = saver.save_async(2)
        state.advance()
        second.result(WAIT_S)
    assert_all_hold(tmp_path, state, {2: 2})


def test_a_filter_sees_what_was_captured(tmp_path: Path) -> None:
    def halve(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
        for block in blocks:
            assert block.data.device.type == "cpu"
        return [block for block in blocks if block.tensor_name() == "large"]

    state = CountingState(10)
    with asyncckpt.Saver(path=tmp_path, tensors=state.tensors, filter_func=halve) as saver:
        keep_busy()
        state.advance()
        future = saver.save_async(1)
        state.advance()
        future.result(WAIT_S)
    assert_holds(tmp_path, {"large": state.expected(1)["large"]}, step=1)


@pytest.mark.cuda_only
def test_without_ordering_these_tests_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switched off: no stream waits for any other."""
    state = CountingState(11)
    with asyncckpt.Saver(path=tmp_path, tensors=state.tensors) as saver:
        saver.save_async(0).result(WAIT_S)
        with monkeypatch.context() as patch:
            patch.setattr(CudaRuntime, "hold_back", lambda self, stream, event: None)
            keep_busy()
            state.advance()
            saver.save_async(1).result(WAIT_S)
    synchronize()
    found = {name: torch.zeros_like(tensor, device=DEVICE) for name, tensor in state.expected().items()}
    asyncckpt.Loader(tmp_path, tensors=found, step=1).load()
    assert differences(found, state.expected(1)) != []
