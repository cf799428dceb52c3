"""Calls of CudaRuntime use no device but their own, have streams of their own, and end no capture of a graph."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch

from asyncckpt.devices import cuda_runtime
from asyncckpt.devices.cuda_runtime import CudaRuntime
from asyncckpt.native import UnusableLibrary
from tests.simulated_device.torch_cuda import GLOBAL_MODE, SimulatedLibrary, SimulatedTorch

pytestmark = pytest.mark.any_core

DEVICE, DEVICES_COUNT = 3, 4
SEEDS = range(20)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> SimulatedTorch:
    made = SimulatedTorch()
    monkeypatch.setattr(cuda_runtime, "torch", made)
    monkeypatch.setattr(cuda_runtime, "load_cuda_library", lambda: SimulatedLibrary(made))
    return made


def without_library() -> SimulatedLibrary:
    raise UnusableLibrary("there is none")


class OnDevice:
    """A tensor of a device."""

    is_cuda = True

    def __init__(self, device: int) -> None:
        self._device = device

    def get_device(self) -> int:
        return self._device


def calls_of(runtime: CudaRuntime, device: int) -> list[Callable[[], object]]:
    """Every kind of call that a save or a load makes on a device."""
    tensor: torch.Tensor = OnDevice(device)  # type: ignore[assignment]
    runtime.device_of(tensor)
    return [
        lambda: runtime.side_stream(device),
        lambda: runtime.current_stream(device),
        lambda: runtime.enqueue(runtime.side_stream(device), lambda: None),
        lambda: runtime.enqueue(runtime.current_stream(device), lambda: None),
        lambda: runtime.record(runtime.side_stream(device)).wait(),
        lambda: runtime.hold_back(runtime.side_stream(device), runtime.record(runtime.current_stream(device))),
        lambda: runtime.new_memory(device, 1000),
        lambda: runtime.new_pinned(1000),
        lambda: runtime.register(4096, 4096),
        lambda: runtime.unregister(4096),
        lambda: runtime.kernels(device),
        runtime.is_capturing,
    ]


def on_new_thread(work: Callable[[], object]) -> None:
    """Do it in a thread that has chosen no device; raise what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("has_library", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_thread_makes_a_context_on_a_device_that_is_not_used(
    seed: int, has_library: bool, simulated: SimulatedTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on device 0, which belongs to another rank: a context takes hundreds of megabytes there."""
    if not has_library:
        monkeypatch.setattr(cuda_runtime, "load_cuda_library", without_library)
    choices = random.Random(seed)
    runtime = CudaRuntime()
    calls = calls_of(runtime, DEVICE)
    if not has_library:
        del calls[8:10]  # Through torch.cuda.cudart, which is not simulated.
    for _ in range(10):
        chosen = choices.choices(calls, k=4)
        on_new_thread(lambda chosen=chosen: [call() for call in chosen])  # type: ignore[misc]
    assert simulated.contexts <= {DEVICE}


def test_a_context_on_another_device_is_found(simulated: SimulatedTorch) -> None:
    """What torch.cuda.stream does in a thread of device 0."""
    stream = simulated.cuda.Stream(DEVICE)

    def run() -> None:
        with simulated.cuda.stream(stream):
            pass

    on_new_thread(run)
    assert simulated.contexts == {0, DEVICE}


@pytest.mark.parametrize("before", [0, 1, 31, 32, 70])
def test_side_streams_are_nobody_elses(before: int, simulated: SimulatedTorch) -> None:
    """A trainer that gets the same stream would wait for copies to the host, and these for training."""
    runtime = CudaRuntime()
    trainers = [simulated.cuda.Stream(1, priority=-(n % 2)) for n in range(before)]
    side = runtime.side_stream(1)
    trainers += [simulated.cuda.Stream(1, priority=-(n % 2)) for n in range(100)]
    assert side not in trainers
    assert runtime.side_stream(1) is side
    assert runtime.side_stream(2) != side


def test_streams_of_torch_return(simulated: SimulatedTorch) -> None:
    """So the test above can fail."""
    first = simulated.cuda.Stream(1, priority=-1)
    assert first in [simulated.cuda.Stream(1, priority=-1) for _ in range(32)]


@pytest.mark.parametrize("number", range(12))
def test_no_call_ends_the_capture_of_another_thread(number: int, simulated: SimulatedTorch) -> None:
    runtime = CudaRuntime()
    call = calls_of(runtime, DEVICE)[number]
    modes: list[int] = []

    def run() -> None:
        call()
        modes.append(simulated.mode)

    with simulated.capture():
        on_new_thread(run)
    assert modes == [GLOBAL_MODE]


def test_a_capture_that_is_ended_is_found(simulated: SimulatedTorch) -> None:
    broken = pytest.raises(RuntimeError, match="capturing")
    with pytest.raises(AssertionError, match="ended"), simulated.capture(), broken:
        on_new_thread(simulated.cuda.Event().query)
