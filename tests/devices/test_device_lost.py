"""A device that fails in the middle of a save: a DeviceError, and everything but that save goes on.

Each test fails at every point at which it can, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.staging.pool import pool
from tests.devices.training import differing, loaded
from tests.simulated_device import SimulatedRuntime
from tests.simulated_device.runtime import KernelsChoice

pytestmark = pytest.mark.any_core

POINTS_MAX = 400
Tensors = dict[str, torch.Tensor]

every_way = pytest.mark.parametrize(
    ("kernels", "scratch_bytes"), [("plain", 0), ("plain", 1 << 20), ("torch", 0), ("torch", 1 << 20)]
)


def new_state(runtime: SimulatedRuntime) -> tuple[Tensors, Tensors]:
    """Tensors of all kinds, and what they hold."""
    made: Tensors = {}
    for device in range(runtime.devices_count):
        matrix = runtime.new_tensor((8, 9), torch.float32, device, values=torch.arange(72) + device)
        made |= {f"matrix{device}": matrix, f"columns{device}": matrix.t()}
    made["host"] = torch.arange(10)
    return made, {name: runtime.read(tensor).contiguous() for name, tensor in made.items()}


@contextmanager
def saving(
    path: Path, kernels: KernelsChoice, scratch_bytes: int
) -> Iterator[tuple[SimulatedRuntime, asyncckpt.Saver, Tensors]]:
    """A Saver that has saved step 1, and the values of its state."""
    runtime = SimulatedRuntime(2, seed=1, kernels=kernels)
    with runtime.installed():
        state, values = new_state(runtime)
        with asyncckpt.Saver(
            path=path, tensors=state, device=asyncckpt.DeviceOptions(scratch_bytes=scratch_bytes), durability="none"
        ) as saver:
            saver.save_async(1).result(30)
            runtime.schedule.run_all()
            yield runtime, saver, values


def error_of_save(saver: asyncckpt.Saver, step: int, *, blocking: bool = False) -> BaseException | None:
    """What a save raises, in the call or from its future."""
    try:
        if blocking:
            saver.save(step)
            return None
        return saver.save_async(step).exception(30)
    except asyncckpt.DeviceError as error:
        return error


def check_all_else_goes_on(
    runtime: SimulatedRuntime, saver: asyncckpt.Saver, values: Tensors, path: Path, *, n: int
) -> None:
    """Behind a failure: with the device lost, and with it found again."""
    discarded = list(pool._lost)
    if n % 4 == 0:
        on_host = {"values": torch.arange(100) + n}
        with asyncckpt.Saver(path=path / f"host{n}", tensors=on_host, durability="none") as other:
            other.save_async(1).result(30)
        assert differing(loaded(path / f"host{n}", 1, on_host), on_host) == []
        assert differing(loaded(path / "all", 1, values), values) == []
    with pytest.raises(asyncckpt.NotFoundError):
        loaded(path / "all", 2, values)
    runtime.recover()
    saver.save_async(3 + n).result(30)
    assert differing(loaded(path / "all", 3 + n, values), values) == []
    assert not {id(arena) for arena in discarded} & {id(arena) for arena in pool._arenas}


def fail_each(path: Path, kernels: KernelsChoice, scratch_bytes: int, name: str, said: str, **how: bool) -> int:
    """Fail the n-th of what a save does on its device, from the first one on; returns how many there are."""
    with saving(path / "all", kernels, scratch_bytes) as (runtime, saver, values):
        for n in range(POINTS_MAX):
            getattr(runtime, name)(n)
            error = error_of_save(saver, 2, **how)
            if error is None:
                return n
            assert isinstance(error, asyncckpt.DeviceError), repr(error)
            assert said in str(error)
            check_all_else_goes_on(runtime, saver, values, path, n=n)
    return POINTS_MAX


@pytest.mark.parametrize(
    ("blocking", "kernels", "scratch_bytes"),
    [(False, "plain", 1 << 20), (False, "torch", 0), (True, "plain", 0), (True, "torch", 0)],
)
def test_a_call_that_fails(blocking: bool, kernels: KernelsChoice, scratch_bytes: int, tmp_path: Path) -> None:
    count = fail_each(tmp_path, kernels, scratch_bytes, "fail_at", "illegal memory access", blocking=blocking)
    assert 5 < count < POINTS_MAX - 1


@pytest.mark.parametrize(("kernels", "scratch_bytes"), [("plain", 0), ("torch", 1 << 20)])
def test_an_operation_that_fails(kernels: KernelsChoice, scratch_bytes: int, tmp_path: Path) -> None:
    assert 2 < fail_each(tmp_path, kernels, scratch_bytes, "fail_operation", "") < POINTS_MAX - 1


def test_the_arena_of_a_lost_device_is_never_used_again(tmp_path: Path) -> None:
    with saving(tmp_path, "plain", 0) as (runtime, saver, _):
        (arena,) = pool._arenas
        runtime.fail_operation(0)
        assert isinstance(error_of_save(saver, 2), asyncckpt.DeviceError)
        assert pool._lost == [arena]
        runtime.recover()
        saver.save_async(3).result(30)
        assert arena not in pool._arenas


def test_a_save_behind_one_whose_device_was_lost_has_its_own_error(tmp_path: Path) -> None:
    with saving(tmp_path, "plain", 0) as (runtime, saver, values):
        with runtime.schedule.busy():
            first = saver.save_async(2)
            second = saver.save_async(3, on_busy="queue")
            runtime.fail_operation(0)
        assert isinstance(first.exception(30), asyncckpt.DeviceError)
        assert isinstance(second.exception(30), asyncckpt.DeviceError)
        runtime.recover()
        saver.save_async(4).result(30)
        assert differing(loaded(tmp_path, 4, values), values) == []


@every_way
def test_without_memory_left_on_the_device(kernels: KernelsChoice, scratch_bytes: int, tmp_path: Path) -> None:
    with saving(tmp_path, kernels, scratch_bytes) as (runtime, saver, values):
        del saver._target.state["columns0"], saver._target.state["columns1"]  # Torch needs memory for strides.
        runtime.is_out_of_memory = True
        saver.save_async(2).result(30)
        runtime.is_out_of_memory = False
        expected = {name: tensor for name, tensor in values.items() if not name.startswith("columns")}
        assert differing(loaded(tmp_path, 2, expected), expected) == []


@every_way
def test_without_pinned_memory(kernels: KernelsChoice, scratch_bytes: int, tmp_path: Path) -> None:
    runtime = SimulatedRuntime(2, seed=2, kernels=kernels)
    with runtime.installed():
        runtime.refuses_to_pin = True
        state, values = new_state(runtime)
        with asyncckpt.Saver(
            path=tmp_path, tensors=state, device=asyncckpt.DeviceOptions(scratch_bytes=scratch_bytes)
        ) as saver:
            future = saver.save_async(1)
            for name, tensor in state.items():
                if name != "host":
                    tensor.fill_(-1)
            future.result(30)
        assert differing(loaded(tmp_path, 1, values), values) == []
