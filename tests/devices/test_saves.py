"""What a save promises of a state on devices, one promise at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.staging.pool import pool
from tests.devices.training import differing
from tests.simulated_device import SimulatedRuntime

Tensors = dict[str, torch.Tensor]


@pytest.fixture(params=["plain", "torch"])
def runtime(request: pytest.FixtureRequest) -> Iterator[SimulatedRuntime]:
    made = SimulatedRuntime(2, seed=3, kernels=request.param)
    with made.installed():
        yield made


def new_state(runtime: SimulatedRuntime) -> tuple[Tensors, Tensors]:
    """A state on two devices and the host, and its values."""
    state = {
        "first": runtime.new_tensor((50, 8), torch.float32, 0, values=torch.arange(400)),
        "second": runtime.new_tensor((9,), torch.int64, 1, values=torch.arange(9)),
        "many": runtime.new_tensor((3, 4), torch.bfloat16, 0, values=torch.arange(12)),
        "host": torch.arange(10),
    }
    return state, {name: runtime.read(tensor) for name, tensor in state.items()}


def loaded(path: Path, step: int, expected: Tensors) -> Tensors:
    targets = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    asyncckpt.Loader(path, tensors=targets, step=step).load()
    return targets


def overwrite(state: Tensors) -> None:
    for tensor in state.values():
        tensor.fill_(99)


def test_the_call_waits_for_no_device(runtime: SimulatedRuntime, tmp_path: Path) -> None:
    state, values = new_state(runtime)
    with asyncckpt.Saver(path=tmp_path, tensors=state) as saver:
        saver.save_async(1).result(30)
        before = len(runtime.schedule.waits)
        with runtime.schedule.busy():  # Waits of the background are counted, and last until the trainer is through.
            saver.save_async(2)
            overwrite(state)
            assert threading.get_ident() not in runtime.schedule.waits[before:]
    assert differing(loaded(tmp_path, 2, values), values) == []


def test_a_state_on_the_host_asks_nothing_of_devices(runtime: SimulatedRuntime, tmp_path: Path) -> None:
    state = {"host": torch.arange(10)}
    with asyncckpt.Saver(path=tmp_path, tensors=state) as saver:
        future = saver.save_async(1)
        future.wait_staged(0)
        future.result(30)
    assert runtime.calls_count == 0


def test_a_save_within_the_capture_of_a_graph_is_refused(runtime: SimulatedRuntime, tmp_path: Path) -> None:
    state, values = new_state(runtime)
    with asyncckpt.Saver(path=tmp_path, tensors=state) as saver:
        saver.save_async(1).result(30)
        runtime.schedule.run_all()
        calls = runtime.calls_count
        with runtime.capturing():
            for save in (saver.save_async, saver.save):
                with pytest.raises(asyncckpt.UsageError, match="graph is being captured"):
                    save(2)
        assert runtime.calls_count == calls
        saver.save_async(2).result(30)
    assert differing(loaded(tmp_path, 2, values), values) == []


def test_wait_staged_lets_any_stream_change_the_state(runtime: SimulatedRuntime, tmp_path: Path) -> None:
    state, values = new_state(runtime)
    with asyncckpt.Saver(path=tmp_path, tensors=state, device_scratch_bytes=1000) as saver:
        future = saver.save_async(1)
        future.wait_staged(30)
        for device in (0, 1):
            with runtime.on(runtime.new_stream(device)):
                overwrite({name: tensor for name, tensor in state.items() if runtime.device_of(tensor) == device})
        runtime.schedule.run_all()
        future.result(30)
    assert differing(loaded(tmp_path, 1, values), values) == []


def test_wait_staged_has_a_limit(runtime: SimulatedRuntime, tmp_path: Path) -> None:
    state, _ = new_state(runtime)
    with asyncckpt.Saver(path=tmp_path, tensors=state) as saver, runtime.schedule.busy():
        future = saver.save_async(1)
        with pytest.raises(asyncckpt.DeadlineError):
            future.wait_staged(0)


def test_fence_holds_a_stream_back_while_the_background_waits(runtime: SimulatedRuntime, tmp_path: Path) -> None:
    state, values = new_state(runtime)
    strange = runtime.new_stream(0)
    strange.weight = 1e6
    with asyncckpt.Saver(path=tmp_path, tensors=state) as saver:
        with runtime.schedule.busy():
            future = saver.save_async(1)
            while not runtime.schedule.waits:  # The background is at it.
                pass
            future.fence(strange)
            with runtime.on(strange):
                overwrite({"first": state["first"]})
        future.result(30)
    assert differing(loaded(tmp_path, 1, values), values) == []


def test_a_filter_sees_the_cut(runtime: SimulatedRuntime, tmp_path: Path) -> None:
    state, values = new_state(runtime)

    def doubled(blocks: list[asyncckpt.WriteBlock]) -> Sequence[asyncckpt.WriteBlock]:
        return [block.replace(data=block.data * 2) if block.tensor_name() == "first" else block for block in blocks]

    with asyncckpt.Saver(path=tmp_path, tensors=state, filter_func=doubled) as saver:
        future = saver.save_async(1)
        overwrite(state)
        future.result(30)
    values["first"] *= 2
    assert differing(loaded(tmp_path, 1, values), values) == []


@pytest.mark.parametrize("is_filtered", [False, True])
def test_a_blocking_save_follows_all_streams(runtime: SimulatedRuntime, tmp_path: Path, is_filtered: bool) -> None:
    state, values = new_state(runtime)
    known = runtime.new_stream(0)
    known.weight = 1e-6
    runtime.schedule.needed_share = 1.0
    filters = {"filter_func": lambda blocks: [block.replace(data=block.data + 0) for block in blocks]}
    with asyncckpt.Saver(path=tmp_path, tensors=state, streams=[known], **(filters if is_filtered else {})) as saver:
        runtime.hold_back(known, runtime.record(runtime.current_stream(0)))
        with runtime.on(known):
            state["first"].fill_(5)
        saver.save(1)
    values["first"].fill_(5)
    assert differing(loaded(tmp_path, 1, values), values) == []


def test_a_save_that_does_not_fit_blocks_and_holds_the_cut(runtime: SimulatedRuntime, tmp_path: Path) -> None:
    state, values = new_state(runtime)
    with asyncckpt.Saver(path=tmp_path, tensors=state, host_memory_limit=0) as saver:
        pool.trim()
        with pytest.warns(RuntimeWarning, match="this save blocks"):
            future = saver.save_async(1)
        assert future.done()
        overwrite(state)
    assert differing(loaded(tmp_path, 1, values), values) == []


def test_periodic_saves_hold_their_cuts(runtime: SimulatedRuntime, tmp_path: Path) -> None:
    state, targets = new_state(runtime)
    cuts: dict[int, Tensors] = {}
    saver = asyncckpt.Saver(path=tmp_path, tensors=state, durability="none")
    with saver, asyncckpt.PeriodicSaver(saver, every_steps=2) as periodic:
        for step in range(1, 13):
            for tensor in state.values():
                tensor.fill_(step)
            if periodic.step(step) is not None:
                cuts[step] = {name: torch.full_like(tensor, step) for name, tensor in targets.items()}
    assert list(cuts) == asyncckpt.list_steps(tmp_path)
    for step, cut in cuts.items():
        assert differing(loaded(tmp_path, step, cut), cut) == []


def test_pinned_memory_limit_is_kept(runtime: SimulatedRuntime, tmp_path: Path) -> None:
    state, values = new_state(runtime)
    with asyncckpt.Saver(path=tmp_path, tensors=state, pinned_memory_limit=4096) as saver:
        future = saver.save_async(1)
        overwrite(state)
        assert runtime.registered == {}
        future.result(30)
    assert differing(loaded(tmp_path, 1, values), values) == []
