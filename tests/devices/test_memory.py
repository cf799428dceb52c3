"""Memory that is not there, and memory that is pinned in part: a save goes on without, or fails and holds nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.staging.pool import MAPPED_UNIT_BYTES, ArenaState, pool
from tests.devices.tables import DeviceTable, new_target, rows_of
from tests.devices.training import differing, loaded
from tests.simulated_device import SimulatedRuntime
from tests.simulated_device.runtime import KernelsChoice
from tests.worlds.arenas import close_free

pytestmark = pytest.mark.any_core

ALLOCATIONS_MAX = 60
Tensors = dict[str, torch.Tensor]

every_way = pytest.mark.parametrize(
    ("kernels", "scratch_bytes"), [("plain", 0), ("plain", 1 << 20), ("torch", 0), ("torch", 1 << 20)]
)


@every_way
def test_a_save_into_an_arena_that_is_pinned_in_part(
    kernels: KernelsChoice, scratch_bytes: int, tmp_path: Path
) -> None:
    """As when a state outgrows pinned_memory_limit: CUDA refuses copies over the border."""
    runtime = SimulatedRuntime(1, seed=4, kernels=kernels)
    options = asyncckpt.DeviceOptions(scratch_bytes=scratch_bytes, pinned_memory_limit=MAPPED_UNIT_BYTES)
    with runtime.installed():
        close_free(pool)
        small = {"small": runtime.new_tensor((100,), torch.float32, values=torch.arange(100))}
        with asyncckpt.Saver(path=tmp_path / "small", tensors=small, device=options, durability="none") as saver:
            saver.save_async(1).result(30)
        matrix = runtime.new_tensor((500, 900), torch.float32, values=torch.arange(450_000))
        state = {"matrix": matrix, "columns": matrix.t(), "bytes": runtime.new_tensor((3_000_000,), torch.uint8)}
        values = {name: runtime.read(tensor) for name, tensor in state.items()}
        with asyncckpt.Saver(path=tmp_path / "large", tensors=state, device=options, durability="none") as saver:
            saver.save_async(1).result(30)
            (arena,) = pool._arenas
            assert 0 < arena.pinned[1] < arena.touched_bytes
        assert differing(loaded(tmp_path / "large", 1, values), values) == []


@pytest.mark.parametrize("kernels", ["plain", "torch"])
def test_scratch_memory_that_does_not_fit_is_not_asked_for(kernels: KernelsChoice, tmp_path: Path) -> None:
    """An allocator that finds none gives back its cache and waits for the device, at every save."""
    runtime = SimulatedRuntime(1, seed=5, kernels=kernels, device_bytes=5 << 20)
    with runtime.installed():
        state = {"large": runtime.new_tensor((3 << 20,), torch.uint8, values=torch.arange(3 << 20))}
        values = {name: runtime.read(tensor) for name, tensor in state.items()}
        options = asyncckpt.DeviceOptions(scratch_bytes=1 << 30)
        with asyncckpt.Saver(path=tmp_path, tensors=state, device=options, durability="none") as saver:
            for step in range(3):
                saver.save_async(step).result(30)
        assert differing(loaded(tmp_path, 2, values), values) == []
    assert runtime.flushes_count == 0


@pytest.mark.parametrize("blocking", [False, True])
@every_way
def test_every_allocation_of_a_save_may_fail(
    blocking: bool, kernels: KernelsChoice, scratch_bytes: int, tmp_path: Path
) -> None:
    """The save goes on, or fails and says so; no arena is held or lost, and the next save commits."""
    runtime = SimulatedRuntime(2, seed=2, kernels=kernels)
    options = asyncckpt.DeviceOptions(scratch_bytes=scratch_bytes)
    failures = 0
    with runtime.installed():
        matrix = runtime.new_tensor((8, 3, 5, 5), torch.float32, values=torch.arange(600))
        state = {
            "plain": matrix,
            "channels last": matrix.permute(0, 2, 3, 1),
            "other": runtime.new_tensor((9,), torch.int64, 1, values=torch.arange(9)),
            "host": torch.arange(10),
        }
        values = {name: runtime.read(tensor).contiguous() for name, tensor in state.items()}
        table = DeviceTable(runtime, capacity=40, storage=0, cache=0, cache_rows=6)
        table.insert(range(100, 130))
        with asyncckpt.Saver(
            path=tmp_path, tensors=state, hashtables={"table": table}, device=options, durability="none"
        ) as saver:
            for n in range(ALLOCATIONS_MAX):
                close_free(pool)
                table.write([100 + n % 30])
                runtime.fail_allocation(n)
                error: BaseException | None = None
                try:
                    if blocking:
                        saver.save(2 * n)
                    else:
                        error = saver.save_async(2 * n).exception(30)
                except asyncckpt.CheckpointError as found:
                    error = found
                was_reached = runtime.recover()
                assert error is None or isinstance(error, asyncckpt.IOFailedError), repr(error)
                failures += error is not None
                assert pool._lost == []
                assert all(arena.state is ArenaState.FREE for arena in pool._arenas)
                last = 2 * n
                if error is not None:
                    assert last not in asyncckpt.list_steps(tmp_path)
                    last += 1
                    saver.save_async(last).result(30)
                assert differing(loaded(tmp_path, last, values), values) == []
                target = new_target()
                asyncckpt.Loader(tmp_path, hashtables={"table": target}, step=last).load()
                assert rows_of(target) == table.rows
                if not was_reached:
                    break
    assert 2 < n < ALLOCATIONS_MAX - 1


@pytest.mark.parametrize("kernels", ["plain", "torch"])
def test_every_allocation_of_a_load_may_fail(kernels: KernelsChoice, tmp_path: Path) -> None:
    runtime = SimulatedRuntime(2, seed=3, kernels=kernels)
    with runtime.installed():
        values = {name: torch.arange(600.0).view(20, 30) + n for n, name in enumerate(("plain", "strided", "other"))}
        with asyncckpt.Saver(path=tmp_path, tensors=values) as saver:
            saver.save(1)
        targets = {
            "plain": runtime.new_tensor((20, 30), torch.float32),
            "strided": runtime.new_tensor((30, 20), torch.float32).t(),
            "other": runtime.new_tensor((20, 30), torch.float32, 1),
        }
        for n in range(ALLOCATIONS_MAX):
            for tensor in targets.values():
                tensor.fill_(-1)
            runtime.fail_allocation(n)
            try:
                asyncckpt.Loader(tmp_path, tensors=targets).load()
            except asyncckpt.CheckpointError:
                asyncckpt.Loader(tmp_path, tensors=targets).load()
            found = {name: runtime.read(tensor).contiguous() for name, tensor in targets.items()}
            assert differing(found, values) == []
            if not runtime.recover():
                break
    assert 1 < n < ALLOCATIONS_MAX - 1
