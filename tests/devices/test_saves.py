"""What a save promises of a state on devices, one promise at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.devices.watches import Watch
from asyncckpt.engine.features.steps import StepFences
from asyncckpt.staging.pool import Arena, ArenaState, pool
from tests.devices.training import differing, loaded
from tests.simulated_device import SimulatedRuntime
from tests.steps.gate import watch_short
from tests.worlds.arenas import close_free

pytestmark = pytest.mark.any_core

Tensors = dict[str, torch.Tensor]


@pytest.fixture(params=["plain", "torch"])
def runtime(request: pytest.FixtureRequest) -> Iterator[SimulatedRuntime]:
    made = SimulatedRuntime(2, seed=3, kernels=request.param)
    with made.installed():
        yield made


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps wait for short tensors, too."""
    watch_short(monkeypatch)


def new_state(runtime: SimulatedRuntime) -> tuple[Tensors, Tensors]:
    """A state on two devices and the host, and its values."""
    state = {
        "first": runtime.new_tensor((50, 8), torch.float32, 0, values=torch.arange(400)),
        "second": runtime.new_tensor((9,), torch.int64, 1, values=torch.arange(9)),
        "many": runtime.new_tensor((3, 4), torch.bfloat16, 0, values=torch.arange(12)),
        "host": torch.arange(10),
    }
    return state, {name: runtime.read(tensor) for name, tensor in state.items()}


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


def test_tied_tensors_of_a_device_are_stored_once(runtime: SimulatedRuntime, tmp_path: Path) -> None:
    state, values = new_state(runtime)
    state["tied"], values["tied"] = state["first"].detach(), values["first"]
    state["rows"], values["rows"] = state["first"][2:], values["first"][2:]
    with asyncckpt.Saver(path=tmp_path, tensors=state) as saver:
        saver.save_async(1).result(30)
    assert asyncckpt.describe(tmp_path, 1).tied == {"tied": "first"}
    assert differing(loaded(tmp_path, 1, values), values) == []
    found = asyncckpt.load(tmp_path)
    found["first"][5, 5] = 77.0
    assert float(found["tied"][5, 5]) == float(found["rows"][3, 5]) == 77.0


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
    with asyncckpt.Saver(path=tmp_path, tensors=state, device=asyncckpt.DeviceOptions(scratch_bytes=1000)) as saver:
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
    runtime.schedule.pace = runtime.schedule.needed_share = 0.0
    with asyncckpt.Saver(path=tmp_path, tensors=state) as saver:
        with runtime.schedule.busy():
            future = saver.save_async(1)
            runtime.schedule.await_waiter()
            future.fence(strange)
            with runtime.on(strange):
                overwrite({"first": state["first"]})
        future.result(30)
    assert differing(loaded(tmp_path, 1, values), values) == []


def test_a_filter_sees_the_cut(runtime: SimulatedRuntime, tmp_path: Path) -> None:
    state, values = new_state(runtime)

    def doubled(blocks: list[asyncckpt.filters.WriteBlock]) -> Sequence[asyncckpt.filters.WriteBlock]:
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
    with asyncckpt.Saver(
        path=tmp_path,
        tensors=state,
        device=asyncckpt.DeviceOptions(streams=[known]),
        **(filters if is_filtered else {}),
    ) as saver:
        runtime.hold_back(known, runtime.record(runtime.current_stream(0)))
        with runtime.on(known):
            state["first"].fill_(5)
        saver.save(1)
    values["first"].fill_(5)
    assert differing(loaded(tmp_path, 1, values), values) == []


def test_a_save_that_does_not_fit_blocks_and_holds_the_cut(runtime: SimulatedRuntime, tmp_path: Path) -> None:
    state, values = new_state(runtime)
    with asyncckpt.Saver(path=tmp_path, tensors=state, host_memory_limit=0) as saver:
        close_free(pool)
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
    cuts[step] = {name: torch.full_like(tensor, step) for name, tensor in targets.items()}  # The last one, always.
    assert list(cuts) == asyncckpt.list_steps(tmp_path)
    for step, cut in cuts.items():
        assert differing(loaded(tmp_path, step, cut), cut) == []


def test_pinned_memory_limit_is_kept(runtime: SimulatedRuntime, tmp_path: Path) -> None:
    state, values = new_state(runtime)
    with asyncckpt.Saver(
        path=tmp_path, tensors=state, device=asyncckpt.DeviceOptions(pinned_memory_limit=4096)
    ) as saver:
        future = saver.save_async(1)
        overwrite(state)
        assert runtime.registered == {}
        future.result(30)
    assert differing(loaded(tmp_path, 1, values), values) == []


def stepped_state(runtime: SimulatedRuntime) -> tuple[Tensors, torch.optim.Optimizer, Tensors]:
    """A parameter with momentum, and a buffer that any forward may change; and their values after one step."""
    parameter = torch.nn.Parameter(runtime.new_tensor((64, 3), torch.float32, values=torch.arange(192)))
    buffer = runtime.new_tensor((8,), torch.float32, values=torch.arange(8))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9, foreach=False)
    parameter.grad = runtime.new_tensor((64, 3), torch.float32, values=torch.ones(192))
    optimizer.step()
    state = {"parameter": parameter, "momentum": optimizer.state[parameter]["momentum_buffer"], "buffer": buffer}
    return state, optimizer, {name: runtime.read(tensor) for name, tensor in state.items()}


def saved_before_a_step(seed: int, path: Path) -> list[str]:
    """Save, go forward, step; returns what is not as it was at the save."""
    runtime = SimulatedRuntime(1, seed=seed)
    with runtime.installed():
        state, optimizer, values = stepped_state(runtime)
        with asyncckpt.Saver(
            path=path,
            tensors=state,
            device=asyncckpt.DeviceOptions(optimizers=[optimizer], scratch_bytes=[0, 500, 5000][seed % 3]),
        ) as saver:
            with runtime.schedule.busy():
                future = saver.save_async(1)
                state["buffer"].fill_(99)
                optimizer.step()
            future.result(30)
        return differing(loaded(path, 1, values), values)


@pytest.mark.parametrize("seed", range(15))
def test_a_step_waits_for_what_only_steps_change(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 5:
        watch_short(monkeypatch)
    assert saved_before_a_step(seed, tmp_path) == []


@pytest.mark.usefixtures("short")
def test_a_step_that_does_not_wait_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepFences, "before_step", lambda *_: None)
    with pytest.raises(asyncckpt.UsageError, match="was changed between save_async"):
        saved_before_a_step(0, tmp_path / "refused")
    monkeypatch.setattr(Watch, "check_unchanged", lambda self: None)
    assert any(saved_before_a_step(seed, tmp_path / str(seed)) for seed in range(60))


@pytest.mark.usefixtures("short")
def test_more_than_a_stepped_tensor_is_waited_for_at_once(tmp_path: Path) -> None:
    """A buffer that begins where a parameter does, and goes on behind it."""
    runtime = SimulatedRuntime(1)
    with runtime.installed():
        flat = runtime.new_tensor((300,), torch.float32, values=torch.arange(300))
        parameter = torch.nn.Parameter(flat.data[:192])  # With a version of its own.
        state = {"flat": flat, "parameter": parameter}
        values = {name: runtime.read(tensor) for name, tensor in state.items()}
        runtime.schedule.pace, runtime.schedule.needed_share = 0.0, 1.0
        optimizer = torch.optim.SGD([parameter], lr=0.5, foreach=False)
        with asyncckpt.Saver(
            path=tmp_path, tensors=state, device=asyncckpt.DeviceOptions(optimizers=[optimizer])
        ) as saver:
            with runtime.schedule.busy():
                future = saver.save_async(1)
                flat[192:].fill_(99)
                runtime.record(runtime.current_stream(0)).wait()
            future.result(30)
    assert differing(loaded(tmp_path, 1, values), values) == []


@pytest.mark.usefixtures("short")
def test_forward_does_not_wait_for_what_only_steps_change(tmp_path: Path) -> None:
    runtime = SimulatedRuntime(1)
    runtime.schedule.pace, runtime.schedule.needed_share = 0.0, 1.0
    with runtime.installed():
        state, optimizer, _ = stepped_state(runtime)
        saver = asyncckpt.Saver(path=tmp_path, tensors=state, device=asyncckpt.DeviceOptions(optimizers=[optimizer]))
        with saver, runtime.schedule.busy():
            saver.save_async(1)
            main, side = runtime.current_stream(0), runtime.side_stream(0)
            state["buffer"].fill_(99)
            runtime.record(main).wait()
            assert any(operation.work for operation in side.queue)
            optimizer.step()
            runtime.record(main).wait()
            assert not any(operation.work for operation in side.queue)


def test_an_interrupt_behind_the_launch_waits_for_the_devices(
    runtime: SimulatedRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, values = new_state(runtime)
    with asyncckpt.Saver(path=tmp_path, tensors=state) as saver:
        saver.save_async(1).result(30)
        runtime.schedule.run_all()
        runtime.schedule.pace = 0.0
        with monkeypatch.context() as patch:
            patch.setattr(Arena, "seal", interrupt)
            with pytest.raises(KeyboardInterrupt):
                saver.save_async(2)
        assert not any(operation.work for stream in runtime.schedule.streams for operation in stream.queue)
        assert [arena.state for arena in pool._arenas] == [ArenaState.FREE]
        saver.save_async(3).result(30)
    assert asyncckpt.list_steps(tmp_path) == [1, 3]
    assert differing(loaded(tmp_path, 3, values), values) == []


def interrupt(arena: Arena) -> None:
    raise KeyboardInterrupt
