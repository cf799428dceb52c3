"""Every function of the CUDA library against NumPy and torch, on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncckpt.devices.current_runtime import runtime
from asyncckpt.native.cuda import DeviceFailure
from tests.gpu import kernel_calls as calls
from tests.gpu.device import DEVICE, is_busy, keep_busy, new_stream, on

SEEDS = range(3)


@pytest.fixture(params=SEEDS)
def world(request: pytest.FixtureRequest) -> calls.Memory:
    return calls.Memory(request.param)


@pytest.mark.parametrize("bytes", [1, 4096, 5_000_001])
def test_long_segments(world: calls.Memory, bytes: int) -> None:
    calls.copy_long(world, bytes=bytes)


@pytest.mark.parametrize("count", [1, 2, 33, 12_000])
@pytest.mark.parametrize(("to_host", "device_table"), [(False, False), (True, False), (True, True)])
def test_batches(world: calls.Memory, count: int, to_host: bool, device_table: bool) -> None:
    calls.copy_batch(world, count=count, to_host=to_host, device_table=device_table)


@pytest.mark.parametrize("row_bytes", calls.ROW_BYTES)
@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize("by", ["both", "source", "target"])
def test_rows(world: calls.Memory, row_bytes: int, to_host: bool, by: str) -> None:
    calls.copy_rows(world, row_bytes=row_bytes, to_host=to_host, by=by)


def test_many_rows(world: calls.Memory) -> None:
    calls.copy_rows(world, row_bytes=128, rows=200_000, count=150_000)


@pytest.mark.parametrize("row_bytes", [4, 48, 512, 515])
@pytest.mark.parametrize("to_host", [False, True])
def test_marked_rows(world: calls.Memory, row_bytes: int, to_host: bool) -> None:
    calls.copy_marked_rows(world, row_bytes=row_bytes, to_host=to_host)


def test_prints_of_rows_of_every_width_are_those_of_the_host() -> None:
    for begin in range(1, 300, 23):
        calls.fingerprints(calls.Memory(begin), widths=tuple(range(begin, begin + 23)))


def test_registered_memory(world: calls.Memory) -> None:
    calls.registered_memory(world)


def test_no_work(world: calls.Memory) -> None:
    calls.nothing(world)


def test_the_library_is_used_here() -> None:
    """Not passed over for torch's operations."""
    world = calls.Memory(0)
    world.library.check_usable(world.device)
    found = runtime()
    if found is not None:
        assert found.kernels(world.device).name == "cuda"


def test_a_device_that_is_not_there_is_a_failure() -> None:
    world = calls.Memory(0)
    with pytest.raises(DeviceFailure):
        world.library.check_usable(1000)


def test_calls_do_not_wait_for_the_device() -> None:
    world, stream = calls.Memory(0), new_stream()
    source, target = world.put(world.bytes(100_000)), world.guarded(100_000, on_host=True)
    rows = world.put(np.arange(50, dtype=np.int64))
    table = world.guarded(world.library.batch_table_bytes(1), on_host=True)
    segments = np.array([[source.data_ptr(), target.data_ptr(), 100_000]], dtype=np.uint64)
    columns = np.array([[source.data_ptr(), target.data_ptr(), 1000]], dtype=np.uint64)
    torch.cuda.synchronize() if DEVICE.startswith("cuda") else None
    with on(stream):
        keep_busy()
        world.library.copy(world.device, segments, world.stream)
        world.library.copy_batch(world.device, segments, table.data_ptr(), world.stream)
        world.library.copy_rows(world.device, columns, rows.data_ptr(), None, 50, world.stream)
        assert is_busy(stream)
    assert np.array_equal(world.read(target), world.read(source))


def test_the_current_device_stays(world: calls.Memory) -> None:
    before = torch.cuda.current_device() if DEVICE.startswith("cuda") else 0
    calls.copy_batch(world)
    assert (torch.cuda.current_device() if DEVICE.startswith("cuda") else 0) == before
