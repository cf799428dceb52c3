"""The simulation keeps CUDA's promises, breaks what CUDA does not promise, and finds what CUDA would not forgive."""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from asyncckpt.devices.batch import Batch
from asyncckpt.devices.cuda_runtime import host_view
from asyncckpt.errors import DeviceError
from tests.simulated_device import SimulatedRuntime, SimulationFault
from tests.simulated_device.memory import OutOfMemory

pytestmark = pytest.mark.any_core


def fate_of_child(work: object) -> int:
    """The signal by which a child that does this ends; 0: none."""
    assert callable(work)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # The child of a process with threads does next to nothing.
        child = os.fork()
    if not child:
        faulthandler.disable()
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def test_a_host_that_touches_memory_of_a_device_dies() -> None:
    runtime = SimulatedRuntime(1)
    tensor = runtime.new_tensor((4,), torch.uint8, values=torch.zeros(4))
    runtime.schedule.run_all()
    assert fate_of_child(lambda: tensor.sum()) == signal.SIGSEGV
    assert fate_of_child(lambda: tensor.numpy()[0]) == signal.SIGSEGV
    assert fate_of_child(lambda: torch.zeros(4).sum()) == 0


def test_an_operation_does_not_reach_the_memory_of_another_device() -> None:
    runtime = SimulatedRuntime(2)
    runtime.schedule.pace = 0.0
    tensor = runtime.new_tensor((4,), torch.uint8, 1, values=torch.zeros(4))
    runtime.schedule.run_all()
    runtime.training_op(runtime.current_stream(0), lambda: tensor.sum())
    assert fate_of_child(runtime.schedule.run_all) == signal.SIGSEGV


def test_a_stream_keeps_its_order_and_two_streams_have_none() -> None:
    orders = set()
    for seed in range(40):
        runtime, order = SimulatedRuntime(1, seed=seed), []
        for name in ("a", "b"):
            stream = runtime.new_stream()
            for number in "12":
                runtime.training_op(stream, partial(order.append, name + number))
        runtime.schedule.run_all()
        assert order.index("a1") < order.index("a2")
        assert order.index("b1") < order.index("b2")
        orders.add(tuple(order))
    assert len(orders) == 6


def test_the_same_seed_is_the_same_order() -> None:
    def order_of(seed: int) -> list[int]:
        runtime, order = SimulatedRuntime(1, seed=seed), []
        for number in range(30):
            runtime.training_op(runtime.new_stream(), lambda number=number: order.append(number))
        runtime.schedule.run_all()
        return order

    assert order_of(7) == order_of(7)
    assert len({tuple(order_of(seed)) for seed in range(10)}) > 5


@pytest.mark.parametrize("seed", range(20))
def test_what_is_held_back_comes_behind_the_event(seed: int) -> None:
    runtime, order = SimulatedRuntime(2, seed=seed), []
    first, second = runtime.new_stream(0), runtime.new_stream(1)
    runtime.training_op(first, lambda: order.append("first"))
    event = runtime.record(first)
    runtime.hold_back(second, event)
    runtime.training_op(second, lambda: order.append("second"))
    runtime.record(second).wait()
    assert order == ["first", "second"]
    assert event.is_done()


def test_some_orders_are_late_and_some_are_early() -> None:
    done = set()
    for seed in range(20):
        runtime = SimulatedRuntime(1, seed=seed)
        stream = runtime.new_stream()
        runtime.training_op(stream, lambda: None)
        done.add(runtime.record(stream).is_done())
    assert done == {True, False}


def test_streams_that_wait_for_each_other_are_a_fault() -> None:
    runtime = SimulatedRuntime(1)
    runtime.schedule.pace = 0.0
    first, second = runtime.new_stream(), runtime.new_stream()
    event = runtime.record(first)
    runtime.hold_back(second, event)
    held = runtime.record(second)
    runtime.hold_back(first, held)
    first.queue.rotate(1)  # No order of calls leads here: an event is recorded before it is waited for.
    with pytest.raises(SimulationFault, match="never ends"):
        event.wait()
    with pytest.raises(AssertionError, match="never ends"):
        runtime.check()


def test_operations_of_torch_are_queued_and_their_results_are_on_the_device() -> None:
    runtime = SimulatedRuntime(1)
    runtime.schedule.pace = 0.0
    with runtime.installed():
        tensor = runtime.new_tensor((3, 4), torch.float32, values=torch.arange(12))
        runs = runtime.schedule.runs_count
        picked = (tensor.t() + 1).index_select(0, torch.tensor([2, 0])).contiguous()
        tensor.fill_(0)
        assert runtime.device_of(picked) == 0
        assert runtime.schedule.runs_count == runs
        assert runtime.read(picked).tolist() == [[3, 7, 11], [1, 5, 9]]
        assert tensor.sum().item() == 0


def test_dropped_memory_is_used_again_at_once_on_its_stream_alone() -> None:
    runtime = SimulatedRuntime(1)
    tensor = runtime.new_tensor((100,), torch.uint8)
    address = tensor.data_ptr()
    view = tensor[10:]
    del tensor
    assert runtime.new_tensor((100,), torch.uint8).data_ptr() != address
    del view
    with runtime.on(runtime.new_stream()):
        assert runtime.new_tensor((100,), torch.uint8).data_ptr() != address
    assert runtime.new_tensor((100,), torch.uint8).data_ptr() == address


def test_fresh_memory_holds_garbage() -> None:
    runtime = SimulatedRuntime(1)
    assert len({runtime.read(runtime.new_tensor((1,), torch.uint8)).item() for _ in range(20)}) > 1


def test_a_copy_to_memory_that_is_not_pinned_waits() -> None:
    runtime = SimulatedRuntime(1)
    runtime.schedule.pace = 0.0
    with runtime.installed():
        tensor = runtime.new_tensor((4,), torch.uint8, values=torch.arange(4))
        plain, pinned = torch.zeros(4, dtype=torch.uint8), runtime.new_pinned(4).fill_(9)
        pinned.copy_(tensor, non_blocking=True)
        assert pinned.tolist() == [9, 9, 9, 9]
        plain.copy_(tensor, non_blocking=True)
        assert plain.tolist() == [0, 1, 2, 3]
        pinned.fill_(9).copy_(tensor)
        assert pinned.tolist() == [0, 1, 2, 3]


def test_torch_conjugates_on_the_host_before_an_asynchronous_copy_arrives() -> None:
    """Which is why copies to the host are never asked of it for conjugated tensors."""
    runtime = SimulatedRuntime(1)
    runtime.schedule.pace = 0.0
    with runtime.installed():
        tensor = runtime.new_tensor((1,), torch.complex64, values=torch.tensor([1 + 2j]))
        target = runtime.new_pinned(8).view(torch.complex64)
        target.copy_(tensor.conj(), non_blocking=True)
        runtime.schedule.run_all()
        assert target.tolist() == [1 + 2j]


def test_registrations_are_checked() -> None:
    runtime = SimulatedRuntime(1)
    region = mmap.mmap(-1, 8 * 4096)
    address = int(np.frombuffer(region, dtype=np.uint8).ctypes.data)
    runtime.register(address, 3 * 4096)
    runtime.register(address + 4 * 4096, 4096)
    for begin, bytes in (
        (0, 4096),
        (4096, 4096),
        (2 * 4096, 3 * 4096),
        (7 * 4096, 100),
        (7 * 4096 + 1, 4096),
        (1 << 40, 4096),
    ):
        with pytest.raises(SimulationFault):
            runtime.register(address + begin, bytes)
    with pytest.raises(SimulationFault):
        runtime.unregister(address + 4096)
    runtime.unregister(address)
    with pytest.raises(SimulationFault):
        runtime.unregister(address)
    runtime.refuses_to_pin = True
    with pytest.raises(DeviceError):
        runtime.register(address, 4096)


def test_memory_that_is_unmapped_while_it_is_registered_is_found() -> None:
    for is_unregistered in (True, False):
        runtime = SimulatedRuntime(1)
        region = mmap.mmap(-1, 64 * 4096)
        view = np.frombuffer(region, dtype=np.uint8)
        address = int(view.ctypes.data)
        runtime.register(address, 64 * 4096)
        del view
        region.close()
        if is_unregistered:
            with pytest.raises(SimulationFault, match="unmapped"):
                runtime.unregister(address)
        else:
            with pytest.raises(AssertionError, match="unmapped"):
                runtime.check()


def segment(source: int, target: int, bytes: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    return np.array([[source, target, bytes]], dtype=np.uint64)


@pytest.mark.parametrize("kernels", ["plain", "library"])
def test_kernels_reach_their_device_and_pinned_memory_alone(kernels: object) -> None:
    runtime = SimulatedRuntime(2, kernels=kernels)  # type: ignore[arg-type]
    batch = Batch(runtime, 0)
    source = runtime.new_tensor((64,), torch.uint8).data_ptr()
    plain, pinned = torch.zeros(64, dtype=torch.uint8), runtime.new_pinned(64)
    elsewhere = runtime.new_tensor((64,), torch.uint8, 1).data_ptr()
    batch.kernels.copy(segment(source, pinned.data_ptr(), 64), batch)
    for target in (plain.data_ptr(), elsewhere, runtime._regions[0].end - 10):
        with pytest.raises(SimulationFault, match="cannot reach"):
            batch.kernels.copy(segment(source, target, 64), batch)
    rows = np.array([0, 9], dtype=np.int64)
    batch.kernels.copy_rows(segment(source, plain.data_ptr(), 4), rows, None, batch)
    with pytest.raises(DeviceError):  # What rows there are is known only on the device.
        batch.settle(batch.record())
    assert len(runtime.schedule.faults) == 4


def test_transfers_take_any_host_memory_and_wait_for_it() -> None:
    runtime = SimulatedRuntime(1)
    runtime.schedule.pace = 0.0
    batch = Batch(runtime, 0)
    device = runtime.new_tensor((4,), torch.uint8, values=torch.arange(4))
    batch.follow()
    plain, pinned = torch.full((4,), 9, dtype=torch.uint8), runtime.new_pinned(4).fill_(9)
    batch.kernels.transfer(segment(device.data_ptr(), pinned.data_ptr(), 4), batch, to_host=True)
    assert pinned.tolist() == [9, 9, 9, 9]
    batch.kernels.transfer(segment(device.data_ptr(), plain.data_ptr(), 4), batch, to_host=True)
    assert plain.tolist() == pinned.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kernels", ["plain", "torch"])
@pytest.mark.parametrize("at", [-50, 4096 - 50, 2 * 4096 - 50])
def test_a_copy_over_the_border_of_a_pinned_range_is_refused(kernels: Any, at: int) -> None:
    """And the device goes on; kernels go over the border of two."""
    runtime = SimulatedRuntime(1, kernels=kernels)
    memory = mmap.mmap(-1, 4 * 4096)
    first = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data) + 4096
    for begin in (first, first + 4096):
        runtime.register(begin, 4096)
    batch = Batch(runtime, 0)
    source = runtime.new_tensor((100,), torch.uint8, values=torch.arange(100))
    batch.follow()
    over = segment(source.data_ptr(), first + at, 100)
    with pytest.raises(DeviceError, match="invalid argument"):
        batch.enqueue(lambda: batch.kernels.transfer(over, batch, to_host=True))
    if kernels == "plain" and at == 4096 - 50:
        batch.kernels.copy(over, batch)
        batch.settle(batch.record())
        assert host_view(first + at, 100).tolist() == list(range(100))
    batch.settle(batch.record())
    runtime.check()


@pytest.mark.parametrize("n", range(3))
def test_an_allocation_that_fails_fails_once_and_alone(n: int) -> None:
    runtime = SimulatedRuntime(1)
    memory = mmap.mmap(-1, 4096)
    calls = [
        (lambda: runtime.new_memory(0, 10), MemoryError),
        (lambda: runtime.new_pinned(10), MemoryError),
        (lambda: runtime.register(int(np.frombuffer(memory, dtype=np.uint8).ctypes.data), 4096), DeviceError),
    ]
    runtime.fail_allocation(n)
    for number, (call, error) in enumerate(calls):
        with pytest.raises(error) if number == n else nullcontext():
            call()
    assert not runtime.schedule.lost


def test_the_host_waits_for_room_in_a_stream() -> None:
    runtime, done = SimulatedRuntime(1), list[int]()
    runtime.schedule.pace = 0.0
    for number in range(1030):
        runtime.training_op(runtime.current_stream(0), lambda number=number: done.append(number))
    assert done == list(range(6))
    assert runtime.schedule.waits_for_room_count == 6


def test_a_table_that_is_overwritten_before_its_launch_runs_is_found() -> None:
    runtime = SimulatedRuntime(1)
    runtime.schedule.pace = 0.0
    batch = Batch(runtime, 0)
    source, target = runtime.new_tensor((64,), torch.uint8), runtime.new_pinned(64)
    batch.kernels.copy(segment(source.data_ptr(), target.data_ptr(), 64), batch)
    batch.settle_early = batch._kept.clear()  # type: ignore[attr-defined]
    for _ in range(3):
        runtime.new_pinned(32)
    with pytest.raises(DeviceError):
        batch.settle(batch.record())
    with pytest.raises(AssertionError, match="overwritten"):
        runtime.check()


def test_a_lost_device_fails_ever_after_and_others_do_not() -> None:
    runtime = SimulatedRuntime(2)
    event = runtime.record(runtime.side_stream(0))
    event.wait()
    runtime.fail_at(1)
    runtime.record(runtime.side_stream(0))
    with pytest.raises(DeviceError, match="CUDA error"):
        runtime.record(runtime.side_stream(0))
    for call in (event.wait, event.is_done, lambda: runtime.new_memory(0, 10)):
        with pytest.raises(DeviceError, match="CUDA error"):
            call()
    runtime.record(runtime.side_stream(1)).wait()
    runtime.recover()
    runtime.record(runtime.side_stream(0)).wait()


def test_an_operation_that_fails_is_found_by_whoever_waits() -> None:
    runtime, done = SimulatedRuntime(1), []
    runtime.schedule.pace = 0.0
    stream = runtime.new_stream()
    for number in range(3):
        runtime.training_op(stream, lambda number=number: done.append(number))
    runtime.fail_operation(1)
    with pytest.raises(DeviceError):
        runtime.record(stream).wait()
    assert done == [0]


def test_memory_that_is_not_there_fails_once() -> None:
    runtime = SimulatedRuntime(1)
    runtime.fail_at(0, lambda: OutOfMemory("CUDA out of memory"))
    with pytest.raises(MemoryError):
        runtime.new_memory(0, 10)
    runtime.new_memory(0, 10)
    with pytest.raises(MemoryError):
        runtime.new_memory(0, 1 << 40)


def test_views_are_of_the_device_that_is_named() -> None:
    runtime = SimulatedRuntime(2)
    address = runtime.new_tensor((8,), torch.uint8, 1).data_ptr()
    assert runtime.device_of(runtime.view(address, 8, 1)) == 1
    for wrong in (0, None):
        with pytest.raises(SimulationFault):
            runtime.view(address, 8, wrong)
    host = torch.arange(8, dtype=torch.uint8)
    assert torch.equal(host_view(host.data_ptr(), 8), host)


def test_no_host_memory_is_an_empty_view() -> None:
    assert host_view(0, 0).shape == (0,)


def test_a_test_that_fails_says_what_the_device_did_not_allow() -> None:
    runtime = SimulatedRuntime(1)

    def fail() -> None:
        with runtime.installed():
            runtime.schedule.fault("a copy goes too far")
            raise ValueError("what came of it")

    with pytest.raises(AssertionError, match="too far") as failed:
        fail()
    assert isinstance(failed.value.__cause__, ValueError)
