"""The copies of one save: their order, the fence, and what is left of them when something fails."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from asyncckpt.devices.copies import SegmentCopy
from asyncckpt.devices.host_copies import HostCopies
from asyncckpt.errors import DeviceError, UsageError
from tests.simulated_device import SimulatedRuntime
from tests.simulated_device.schedule import DeviceLost

pytestmark = pytest.mark.any_core

BYTES = 4096
ROW_BYTES = 64


def pinned_target(runtime: SimulatedRuntime, *, bytes: int = BYTES) -> torch.Tensor:
    target = runtime.new_pinned(bytes)
    target.fill_(0)
    return target


def segment(source: torch.Tensor, target: torch.Tensor) -> np.ndarray[Any, Any]:
    return np.array([[source.data_ptr(), target.data_ptr(), source.nbytes]], dtype=np.uint64)


def reachable(*targets: torch.Tensor) -> list[tuple[int, int]]:
    return [(target.data_ptr(), target.nbytes) for target in targets]


def filled(runtime: SimulatedRuntime, value: int, *, device: int = 0, bytes: int = BYTES) -> torch.Tensor:
    return runtime.new_tensor((bytes,), torch.uint8, device, values=torch.full((bytes,), value))


@pytest.mark.parametrize("kernels", ["plain", "torch"])
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("scratch_bytes", [0, 100, 300, 700, 1000, 2000, 3000, 5000, 10_000, 1 << 20])
def test_what_is_laid_over_comes_last_however_much_scratch_there_is(
    kernels: Any, pinned: bool, scratch_bytes: int
) -> None:
    """Rows over segments, rows over these, a tensor over a part of all."""
    runtime = SimulatedRuntime(1, seed=scratch_bytes, kernels=kernels)
    under, over, top = filled(runtime, 1), filled(runtime, 2), filled(runtime, 3)
    last = filled(runtime, 4, bytes=ROW_BYTES)
    target = pinned_target(runtime) if pinned else torch.zeros(BYTES, dtype=torch.uint8)
    copies = HostCopies(runtime, scratch_bytes=scratch_bytes)
    half = segment(under, target)
    half[0, 2] = BYTES // 2
    copies.on(0).add(half, under)
    copies.on(0).add(half + np.array([[BYTES // 2, BYTES // 2, 0]], dtype=np.uint64), under)
    columns = np.array([[over.data_ptr(), target.data_ptr(), ROW_BYTES]], dtype=np.uint64)
    rows = np.arange(0, BYTES // ROW_BYTES, 2)
    copies.on(0).add_rows(columns, rows, rows, over)
    columns = np.array([[top.data_ptr(), target.data_ptr(), ROW_BYTES]], dtype=np.uint64)
    copies.on(0).add_rows(columns, rows[:7], rows[::3][:7], top)
    order: list[str] = []
    copies.on(0).add_work(lambda: order.append("first"))
    copies.on(0).add_work(lambda: target[-ROW_BYTES:].copy_(runtime_copy))
    runtime_copy = runtime.read(last)
    copies.launch(reachable=reachable(target) if pinned else []).settle()
    expected = torch.ones(BYTES // ROW_BYTES, ROW_BYTES, dtype=torch.uint8)
    expected[::2] = 2
    expected[torch.from_numpy(rows[::3][:7])] = 3
    expected[-1] = 4
    assert torch.equal(target.view(-1, ROW_BYTES), expected)
    assert order == ["first"]
    runtime.check()


def test_nothing_listed_is_nothing_on_its_way() -> None:
    runtime = SimulatedRuntime(2)
    copies = HostCopies(runtime)
    empty = torch.empty(0, dtype=torch.uint8)
    copies.on(0).add(np.zeros((3, 3), dtype=np.uint64))
    copies.on(1).add_rows(np.array([[1, 2, 3]], dtype=np.uint64), np.empty(0, dtype=np.int64), None)
    copies.on(1).add_tensor(empty, empty)
    assert copies.targets == (0, 0)
    assert copies.launch().devices == []
    assert runtime.calls_count == 0
    assert HostCopies(None).launch().devices == []


def test_targets_are_those_of_all_devices() -> None:
    runtime = SimulatedRuntime(2)
    target = pinned_target(runtime)
    copies = HostCopies(runtime)
    for device, begin in ((0, 1000), (1, 2000)):
        source = filled(runtime, 1, device=device, bytes=100)
        copies.on(device).add(segment(source, target[begin:]), source)
    assert copies.targets == (target.data_ptr() + 1000, target.data_ptr() + 2100)
    pending = copies.launch(reachable=reachable(target))
    assert pending.devices == [0, 1]
    pending.settle()


def test_settle_may_be_called_again_and_from_two_threads() -> None:
    runtime = SimulatedRuntime(1)
    source, target, done = filled(runtime, 7), pinned_target(runtime), []
    copies = HostCopies(runtime)
    copies.on(0).add(segment(source, target), source)
    copies.on(0).add_work(lambda: done.append(target.clone()))
    pending = copies.launch(reachable=reachable(target))
    threads = [threading.Thread(target=pending.settle) for _ in range(2)]
    with runtime.schedule.busy():
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(30)
    pending.settle()
    assert len(done) == 1
    assert bool((done[0] == 7).all())


@pytest.mark.parametrize("is_told", [True, False])
def test_streams_that_are_told_of_a_save_wait_for_it(is_told: bool) -> None:
    """The others do not, which this test would not find out if they always came last."""
    found = set()
    for seed in range(30):
        runtime = SimulatedRuntime(2, seed=seed)
        source, target = filled(runtime, 1), pinned_target(runtime)
        runtime.schedule.run_all()
        other = runtime.new_stream(seed % 2)
        copies = HostCopies(runtime)
        copies.on(0).add(segment(source, target), source)
        pending = copies.launch(reachable=reachable(target))
        if is_told:
            pending.fence(other)
        mine = runtime.new_stream(0)
        runtime.hold_back(mine, runtime.record(other))
        runtime.training_op(mine, lambda source=source: source.fill_(9))
        pending.settle()
        found.add(int(target[0]))
        runtime.schedule.run_all()
    assert found == ({1} if is_told else {1, 9})


def test_the_memory_of_sources_is_held_until_the_end() -> None:
    runtime = SimulatedRuntime(1, seed=5)
    runtime.schedule.pace = 0.0
    source, target = filled(runtime, 1), pinned_target(runtime)
    address = source.data_ptr()
    copies = HostCopies(runtime)
    copies.on(0).add(segment(source, target), source)
    pending = copies.launch(reachable=reachable(target))
    del source, copies
    assert filled(runtime, 2).data_ptr() != address
    pending.settle()
    assert bool((target == 1).all())
    assert filled(runtime, 2).data_ptr() == address


def test_a_launch_that_fails_leaves_nothing_on_its_way() -> None:
    for n in range(100):
        runtime = SimulatedRuntime(2, seed=n, kernels="plain")
        runtime.schedule.pace = 0.0
        targets = [pinned_target(runtime) for _ in range(2)]
        copies = HostCopies(runtime, scratch_bytes=1000)
        for device, target in enumerate(targets):
            source = filled(runtime, 1, device=device)
            copies.on(device).add(segment(source, target), source)
        runtime.schedule.run_all()
        runtime.fail_at(n)
        try:
            copies.launch(reachable=reachable(*targets)).settle()
        except DeviceError:
            pass
        else:
            break
        (lost,) = runtime.schedule.lost
        left = [stream for stream in runtime.schedule.streams if stream.device != lost and "side" in stream.name]
        assert not any(operation.work for stream in left for operation in stream.queue)
        runtime.check()
    assert 10 < n < 99


class InterruptedCopy(SegmentCopy):
    """A copy in which the user interrupts."""

    def __init__(self) -> None:
        super().__init__(np.zeros((1, 3), dtype=np.uint64))

    def split(self, bytes_max: int) -> tuple[None, SegmentCopy] | tuple[SegmentCopy, None]:
        return self, None

    def run(self, batch: Any) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_in_a_launch_is_raised_when_nothing_is_on_its_way() -> None:
    runtime = SimulatedRuntime(2)
    runtime.schedule.pace = 0.0
    copies = HostCopies(runtime)
    target = pinned_target(runtime)
    for device in range(2):
        source = filled(runtime, 1, device=device, bytes=100)
        copies.on(device).add(segment(source, target[1000 * device :]), source)
    copies.on(1).copies.append(InterruptedCopy())
    with pytest.raises(KeyboardInterrupt):
        copies.launch(reachable=reachable(target))
    assert bool((target[:100] == 1).all())
    assert not runtime.side_stream(0).queue


def test_one_lost_device_does_not_keep_others_from_arriving() -> None:
    runtime = SimulatedRuntime(2)
    runtime.schedule.pace = 0.0
    targets = [pinned_target(runtime) for _ in range(2)]
    copies = HostCopies(runtime)
    for device, target in enumerate(targets):
        source = filled(runtime, 1, device=device)
        copies.on(device).add(segment(source, target), source)
    pending = copies.launch(reachable=reachable(*targets))
    runtime.schedule.lost.add(0)
    for _ in range(2):
        with pytest.raises(DeviceError, match="illegal memory access"):
            pending.settle()
    assert bool((targets[1] == 1).all())


def test_work_of_the_host_that_fails_is_raised_each_time() -> None:
    runtime = SimulatedRuntime(1)
    copies = HostCopies(runtime)

    def fail() -> None:
        raise MemoryError("no")

    copies.on(0).add_work(fail)
    pending = copies.launch()
    for _ in range(2):
        with pytest.raises(MemoryError):
            pending.settle()


def test_a_launch_within_a_capture_is_refused() -> None:
    runtime = SimulatedRuntime(1)
    source, target = filled(runtime, 1), pinned_target(runtime)
    copies = HostCopies(runtime)
    copies.on(0).add(segment(source, target), source)
    calls = runtime.calls_count
    with runtime.capturing(), pytest.raises(UsageError, match="graph"):
        copies.launch(reachable=reachable(target))
    assert runtime.calls_count == calls


def test_the_error_of_a_lost_device_says_what_cuda_said() -> None:
    runtime = SimulatedRuntime(1)
    runtime.fail_at(0)
    with pytest.raises(DeviceError, match="illegal memory access") as caught:
        runtime.record(runtime.side_stream(0))
    assert isinstance(caught.value.__cause__, DeviceLost)
