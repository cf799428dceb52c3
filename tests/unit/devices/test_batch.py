"""A batch: what queued copies need lives until they are done, and not longer."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import numpy as np
import pytest
import torch

from asyncckpt.devices.batch import Batch
from asyncckpt.errors import DeviceError
from tests.simulated_device import SimulatedRuntime
from tests.simulated_device.memory import OutOfMemory

pytestmark = pytest.mark.any_core


class Thing:
    pass


def bytes_at(runtime: SimulatedRuntime, address: int, count: int) -> bytes:
    return runtime.view(address, count, None).numpy().tobytes()


@pytest.mark.parametrize("sizes", [[1], [0, 5, 0], [700, 3, 900_000, 200_000, 1], [2 << 20, 8], [(1 << 20) - 300, 500]])
def test_pinned_lists_lie_aligned_and_apart(sizes: list[int]) -> None:
    runtime = SimulatedRuntime(1)
    batch = Batch(runtime, 0)
    random = np.random.default_rng(1)
    arrays = [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    addresses = [batch.pinned(array) for array in arrays]
    assert [address % 256 for address in addresses] == [0] * len(sizes)
    for address, array in zip(addresses, arrays, strict=True):
        assert bytes_at(runtime, address, array.size) == array.tobytes()
        assert runtime.is_pinned(np.array([[address, array.size]]))


def test_a_pinned_list_is_a_copy() -> None:
    runtime = SimulatedRuntime(1)
    batch = Batch(runtime, 0)
    array = np.arange(10, dtype=np.int64)[::2]
    address = batch.pinned(array)
    expected = array.tobytes()
    array[:] = 0
    assert bytes_at(runtime, address, 40) == expected


def test_device_memory_is_aligned_reachable_and_the_batchs_own() -> None:
    runtime = SimulatedRuntime(1)
    batch = Batch(runtime, 0)
    first, second = batch.device_memory(100), batch.device_memory(0)
    assert first % 256 == second % 256 == 0
    assert batch.is_reachable(first, 100)
    assert batch.is_reachable(first + 10, 90)
    assert not batch.is_reachable(first, 101)
    batch.settle(batch.record())
    assert Batch(runtime, 0).device_memory(100) == first


@pytest.mark.parametrize(("kernels", "reaches"), [("plain", True), ("torch", False)])
def test_registered_memory_is_reachable_for_kernels_that_reach_the_host(kernels: object, reaches: bool) -> None:
    batch = Batch(SimulatedRuntime(1, kernels=kernels), 0, reachable=[(4096, 100)])  # type: ignore[arg-type]
    assert batch.is_reachable(4096, 100) is reaches
    assert batch.is_reachable(4196, 0) is reaches
    assert not batch.is_reachable(4095, 10)
    assert not batch.is_reachable(4150, 51)


def test_things_are_kept_until_the_batch_is_settled() -> None:
    runtime = SimulatedRuntime(1)
    batch, thing = Batch(runtime, 0), Thing()
    seen = weakref.ref(thing)
    batch.keep(thing)
    del thing
    gc.collect()
    assert seen() is not None
    batch.settle(batch.record())
    assert seen() is None


def test_host_work_is_done_once_in_its_order_behind_the_event() -> None:
    runtime = SimulatedRuntime(1)
    runtime.schedule.pace = 0.0
    batch, order = Batch(runtime, 0), []
    batch.afterwards(lambda: order.append("first"))
    batch.afterwards(lambda: order.append("second"))
    batch.enqueue(lambda: runtime.queue(batch.stream, lambda: order.append("device"), name="test"))
    event = batch.record()
    batch.settle(event)
    batch.settle(event)
    assert order == ["device", "first", "second"]


def test_an_interrupted_settle_keeps_everything_and_may_go_on() -> None:
    runtime = SimulatedRuntime(1)
    batch, thing, order = Batch(runtime, 0), Thing(), []
    seen = weakref.ref(thing)
    batch.keep(thing)
    del thing

    def interrupt_once() -> None:
        order.append("interrupted" if not order else "done")
        if len(order) == 1:
            raise KeyboardInterrupt

    batch.afterwards(interrupt_once)
    event = batch.record()
    with pytest.raises(KeyboardInterrupt):
        batch.settle(event)
    assert seen() is not None
    batch.settle(event)
    assert order == ["interrupted", "done"]
    assert seen() is None


def test_a_lost_device_lets_things_go_and_does_no_host_work() -> None:
    runtime = SimulatedRuntime(1)
    batch, done = Batch(runtime, 0), []
    batch.afterwards(lambda: done.append(1))
    event = batch.record()
    runtime.schedule.lost.add(0)
    with pytest.raises(DeviceError):
        batch.settle(event)
    runtime.recover()
    batch.settle(event)
    assert done == []


def test_follow_comes_behind_the_current_stream_and_those_given() -> None:
    for seed in range(20):
        runtime = SimulatedRuntime(1, seed=seed)
        order: list[str] = []
        current, other = runtime.new_stream(), runtime.new_stream()
        with runtime.on(current):
            for name, stream in (("current", current), ("other", other)):
                runtime.training_op(stream, partial(order.append, name))
            batch = Batch(runtime, 0)
            batch.follow([other])
        runtime.training_op(batch.stream, partial(order.append, "side"))
        batch.settle(batch.record())
        assert order[-1] == "side"
        assert sorted(order[:2]) == ["current", "other"]


def test_pieces_that_touch_are_reached_as_one() -> None:
    batch = Batch(SimulatedRuntime(1), 0, reachable=[(8192, 4096), (4096, 4096), (20480, 4096)])
    assert batch.is_reachable(5000, 7000)
    assert not batch.is_reachable(12000, 300)
    assert not batch.is_reachable(12000, 12000)


def test_memory_that_is_not_there_is_a_memory_error() -> None:
    runtime = SimulatedRuntime(1)
    runtime.is_out_of_memory = True
    with pytest.raises(MemoryError, match="on device 0") as caught:
        Batch(runtime, 0).device_memory(10)
    assert isinstance(caught.value.__cause__, OutOfMemory)
    assert issubclass(torch.cuda.OutOfMemoryError, RuntimeError)
