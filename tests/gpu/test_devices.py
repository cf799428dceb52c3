"""Tensors on several devices, and on devices that are not current."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asyncckpt
from tests.gpu.device import IS_CUDA, keep_busy
from tests.gpu.state import CountingState, blank, differences

WAIT_S = 120
COUNT = torch.cuda.device_count() if IS_CUDA and torch.cuda.is_available() else 1
pytestmark = [
    pytest.mark.cuda_only,
    pytest.mark.skipif(IS_CUDA and COUNT < 2, reason=f"several devices are needed, found {COUNT}"),
]


def advance(state: CountingState, device: int) -> None:
    with torch.cuda.device(device):
        keep_busy()
        state.advance()


@pytest.mark.parametrize("scratch", [0, 1 << 30])
@pytest.mark.parametrize("current", [0, 1])
def test_one_state_on_two_devices_and_the_host(tmp_path: Path, scratch: int, current: int) -> None:
    states = [CountingState(seed, device=device) for seed, device in enumerate(("cuda:0", "cuda:1"))]
    host = CountingState(2, device="cpu")
    tensors = {"zero": states[0].tensors, "one": states[1].tensors, "host": host.tensors}
    with (
        torch.cuda.device(current),
        asyncckpt.Saver(path=tmp_path, tensors=tensors, device=asyncckpt.DeviceOptions(scratch_bytes=scratch)) as saver,
    ):
        for step in range(2):
            for device, state in enumerate(states):
                advance(state, device)
            host.advance()
            future = saver.save_async(step)
            for device, state in enumerate(states):
                advance(state, device)
            future.result(WAIT_S)
            assert torch.cuda.current_device() == current
    for step in range(2):
        expected = {
            "zero": states[0].expected(2 * step + 1),
            "one": states[1].expected(2 * step + 1),
            "host": host.expected(step + 1),
        }
        # Into other devices than those that they were saved from.
        found = {name: blank(one, "cuda:1" if name == "zero" else "cuda:0") for name, one in expected.items()}
        asyncckpt.Loader(tmp_path, tensors=found, step=step).load()
        for name, one in expected.items():
            assert differences(found[name], one) == []


def test_a_state_on_a_device_that_is_not_current(tmp_path: Path) -> None:
    state = CountingState(3, device="cuda:1")
    with torch.cuda.device(0), asyncckpt.Saver(path=tmp_path, tensors=state.tensors) as saver:
        advance(state, 1)
        future = saver.save_async(1)
        advance(state, 1)
        future.result(WAIT_S)
        saver.save(2)
    for step in (1, 2):
        found = blank(state.expected(), "cuda:1")
        asyncckpt.Loader(tmp_path, tensors=found, step=step).load()
        assert differences(found, state.expected(step)) == []


def test_streams_of_other_devices_wait_by_fence(tmp_path: Path) -> None:
    """One that writes to the state from another device, as a copy from peer to peer does."""
    state = CountingState(4, device="cuda:0")
    stream = torch.cuda.Stream("cuda:1")
    with asyncckpt.Saver(path=tmp_path, tensors=state.tensors) as saver:
        advance(state, 0)
        future = saver.save_async(1)
        future.fence(stream)
        with torch.cuda.stream(stream):
            state.live["large"].copy_(torch.zeros_like(state.live["large"], device="cuda:1"), non_blocking=True)
        future.result(WAIT_S)
    found = blank(state.expected(), "cuda:0")
    asyncckpt.Loader(tmp_path, tensors=found).load()
    assert differences(found, state.expected(1)) == []
