"""One tensor to the host, now."""

from __future__ import annotations

import pytest
import torch

from asyncckpt.devices import current_runtime as chosen
from asyncckpt.devices.fetch import to_host, wait_for
from asyncckpt.errors import DeviceError
from tests.simulated_device import SimulatedRuntime

pytestmark = pytest.mark.any_core


def test_tensors_of_the_host_are_not_copied_without_need() -> None:
    tensor = torch.arange(6)
    assert to_host(tensor).data_ptr() == tensor.data_ptr()
    complexes = torch.randn(3, 4, dtype=torch.complex64)
    found = to_host(complexes.t().conj())
    assert torch.equal(found, complexes.t().conj())
    assert found.is_contiguous()
    assert not found.is_conj()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "view",
    [
        lambda tensor: tensor,
        lambda tensor: tensor.t(),
        lambda tensor: tensor.conj(),
        lambda tensor: tensor.conj().imag,
        lambda tensor: tensor[1, 1],
        lambda tensor: tensor[:0],
        lambda tensor: tensor[1:2],
    ],
    ids=["plain", "strided", "conjugated", "negated", "number", "empty", "rows"],
)
def test_values_behind_all_that_is_queued(view: object, seed: int) -> None:
    assert callable(view)
    runtime = SimulatedRuntime(2, seed=seed)
    with runtime.installed():
        values = torch.randn(3, 4, dtype=torch.complex64)
        with runtime.on(runtime.new_stream(1)):
            tensor = runtime.new_tensor((3, 4), torch.complex64, 1)
            tensor.copy_(values)
            found = to_host(view(tensor))
            tensor.fill_(0)
        expected = view(values).resolve_conj().resolve_neg()
        assert torch.equal(found, expected)
        assert found.is_contiguous()
        assert runtime.device_of(found) is None


def test_wait_for_waits_for_the_devices_of_the_tensors_and_the_streams() -> None:
    runtime = SimulatedRuntime(3)
    runtime.schedule.pace, runtime.schedule.needed_share = 0.0, 1.0
    with runtime.installed():
        done: list[str] = []
        extra = runtime.new_stream(0)
        for device in range(3):
            runtime.training_op(runtime.current_stream(device), lambda device=device: done.append(str(device)))
        runtime.training_op(extra, lambda: done.append("extra"))
        tensors = [torch.zeros(1), runtime.new_tensor((2,), torch.uint8, 1), runtime.new_tensor((2,), torch.uint8, 1)]
        wait_for(tensors)
        assert done == ["1"]
        wait_for(tensors[:1])
        assert done == ["1"]
        wait_for([], streams=[extra])
        assert done == ["1", "extra"]


def test_without_devices_there_is_nothing_to_wait_for() -> None:
    assert chosen.runtime() is None
    wait_for([torch.zeros(1)], streams=[object()])


def test_a_lost_device_is_a_device_error() -> None:
    runtime = SimulatedRuntime(1)
    with runtime.installed():
        tensor = runtime.new_tensor((2,), torch.uint8)
        runtime.schedule.lost.add(0)
        with pytest.raises(DeviceError):
            to_host(tensor)
        with pytest.raises(DeviceError):
            wait_for([tensor])


def test_the_runtime_in_use_is_the_last_one_given() -> None:
    first, second = SimulatedRuntime(1), SimulatedRuntime(1)
    tensor = first.new_tensor((2,), torch.uint8)
    with chosen.use(first):
        assert chosen.device_of(tensor) == 0
        with chosen.use(second):
            assert chosen.device_of(tensor) is None
        assert chosen.runtime() is first
    assert chosen.device_of(tensor) is None
