"""The host does not wait for the device in `save_async`.

Shown by what the device has not done yet when the call returns, never by time.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import asyncckpt
from tests.gpu.device import DEVICE, LONG_CYCLES, current_stream, is_busy, keep_busy, synchronize
from tests.gpu.state import CountingState, assert_holds

WAIT_S = 120
VERY_LONG = 5 * LONG_CYCLES
SCRATCH = [0, 1 << 20, 1 << 30]


@pytest.mark.parametrize("scratch", SCRATCH)
def test_the_call_returns_before_the_device_has_come_to_the_copies(tmp_path: Path, scratch: int) -> None:
    state = CountingState(1)
    with asyncckpt.Saver(
        path=tmp_path, tensors=state.tensors, device=asyncckpt.DeviceOptions(scratch_bytes=scratch)
    ) as saver:
        for step in (0, 1):  # The first save makes what later ones use: pinned memory, kernels, a stream.
            synchronize()
            state.advance()
            keep_busy(VERY_LONG)
            future = saver.save_async(step)
            still_busy = is_busy(current_stream())
            state.advance()
            future.result(WAIT_S)
            assert_holds(tmp_path, state.expected(2 * step + 1), step=step)
        assert still_busy


def test_ten_thousand_tensors(tmp_path: Path) -> None:
    tensors = {f"{number}": torch.full((1000,), float(number), device=DEVICE) for number in range(10_000)}
    with asyncckpt.Saver(path=tmp_path, tensors=tensors, durability="none") as saver:
        for step in (0, 1):
            synchronize()
            keep_busy(VERY_LONG)
            future = saver.save_async(step)
            still_busy = is_busy(current_stream())
            for tensor in tensors.values():
                tensor.add_(1)
            future.result(WAIT_S)
        assert still_busy
    expected = {name: torch.full((1000,), float(name) + 1) for name in tensors}
    assert_holds(tmp_path, expected, step=1)


@pytest.mark.cuda_only
def test_wait_staged_is_over_only_when_the_copies_are(tmp_path: Path) -> None:
    state = CountingState(2)
    with asyncckpt.Saver(path=tmp_path, tensors=state.tensors) as saver:
        saver.save_async(0).result(WAIT_S)
        keep_busy(VERY_LONG)
        future = saver.save_async(1)
        with pytest.raises(asyncckpt.DeadlineError):
            future.wait_staged(0.0)
        assert is_busy(current_stream())
        future.wait_staged(WAIT_S)
        future.result(WAIT_S)


def test_a_process_that_uses_no_device_does_not_start_one(tmp_path: Path) -> None:
    script = (
        "import sys, torch, asyncckpt\n"
        "with asyncckpt.Saver(path=sys.argv[1], tensors={'x': torch.ones(3)}) as saver:\n"
        "    saver.save_async(1).result(60)\n"
        "asyncckpt.Loader(sys.argv[1], tensors={'x': torch.zeros(3)}).load()\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=WAIT_S)
