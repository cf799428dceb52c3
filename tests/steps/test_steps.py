"""What a save with `optimizers=` promises of a state on the host, one promise at a time."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.devices.step_copies import StepCopies
from tests.steps import gate as gates
from tests.steps.gate import StepGate, fences_of
from tests.steps.world import Stepped, load_optimizer

pytestmark = pytest.mark.any_core


def test_a_step_copies_what_is_left(world: Stepped, gate: StepGate) -> None:
    values = world.values()
    with gate.held():
        future = world.saver.save_async(1)
        world.buffer.fill_(7)
        gate.await_copier()
        threading.Thread(target=opened_when_all_is_begun, args=(world, gate)).start()
        world.step()
    result = world.check(future, 1, values)
    assert gate.log.count("step") > 10
    assert result.step_wait_seconds > 0
    assert world.saver.statistics().step_wait_seconds >= result.step_wait_seconds


def opened_when_all_is_begun(world: Stepped, gate: StepGate) -> None:
    """Open the gate when the step has nothing left to do but to wait for the chunk of the background."""
    (pending,) = fences_of(world.saver)._pending
    part = pending.steps._parts[0]
    with pending.steps._changed:
        assert pending.steps._changed.wait_for(lambda: not part.chunks, 30)
    gate.open()


def test_a_step_waits_for_the_chunk_of_the_background(world: Stepped, gate: StepGate) -> None:
    world.optimizers[0].register_step_pre_hook(lambda *_: gate.log.append("written"))
    with gate.held():
        future = world.saver.save_async(1)
        gate.await_copier()
        threading.Thread(target=opened_when_all_is_begun, args=(world, gate)).start()
        world.step()
    future.result(30)
    assert "background" in gate.log[: gate.log.index("written")]


def test_a_step_waits_for_nothing_of_other_optimizers(world: Stepped, gate: StepGate) -> None:
    values = world.values()
    with gate.held():
        future = world.saver.save_async(1)
        gate.await_copier()  # Before a chunk of the first one.
        world.bias.grad = torch.ones_like(world.bias)
        world.optimizers[1].step()
    world.check(future, 1, values)


def test_the_background_copies_what_no_step_asks_for(world: Stepped, gate: StepGate) -> None:
    values = world.values()
    world.check(world.saver.save_async(1), 1, values)
    assert set(gate.log) == {"background"}


def test_the_background_copies_in_the_order_of_the_last_steps(world: Stepped) -> None:
    assert fences_of(world.saver)._order == [0, 1]
    world.optimizers[0].step()
    assert fences_of(world.saver)._order == [1, 0]


def test_what_is_changed_otherwise_is_refused_by_name(world: Stepped, gate: StepGate) -> None:
    with gate.held():
        future = world.saver.save_async(1)
        with torch.no_grad():
            world.bias.add_(1)
        world.optimizers[1].step()
    with pytest.raises(asyncckpt.UsageError, match=r"tensor 'bias' was changed between save_async.*wait_staged"):
        future.result(30)
    assert asyncckpt.list_steps(world.path) == [0]
    values = world.values()
    world.check(world.saver.save_async(2), 2, values)


def test_what_is_changed_without_a_step_is_refused_at_the_commit(world: Stepped, gate: StepGate) -> None:
    with gate.held():
        future = world.saver.save_async(1)
        world.optimizers[0].state[world.weight]["exp_avg"].zero_()
    with pytest.raises(asyncckpt.UsageError, match="exp_avg"):
        future.result(30)


def test_a_state_that_is_staged_may_be_changed_by_anything(world: Stepped, gate: StepGate) -> None:
    values = world.values()
    future = world.saver.save_async(1)
    future.wait_staged(30)
    with torch.no_grad():
        world.weight.zero_()
    world.check(future, 1, values)


def test_chunks_that_cannot_be_made_fail_the_save_and_not_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gates.install_before(monkeypatch)
    world = Stepped(tmp_path)
    with gate.held():
        future = world.saver.save_async(1)
        monkeypatch.setattr(np, "repeat", refuse)
        world.step()
        monkeypatch.undo()
    with pytest.raises(asyncckpt.IOFailedError, match="ran out of memory"):
        future.result(30)
    world.saver.close()


def refuse(*_: object, **__: object) -> None:
    raise MemoryError("none left")


def test_freed_memory_is_refused_by_name(world: Stepped, gate: StepGate) -> None:
    with gate.held():
        future = world.saver.save_async(1)
        gate.await_copier()
        world.bias.untyped_storage().resize_(0)
    with pytest.raises(asyncckpt.UsageError, match="memory of tensor 'bias' was freed or moved"):
        future.result(30)
    world.bias.untyped_storage().resize_(90 * 4)


def swap_data(world: Stepped) -> None:
    world.weight.data = torch.zeros(300)
    world.optimizers[0].state[world.weight]["exp_avg"].data = torch.zeros(300)


def step_with_closure(world: Stepped) -> None:
    def closure() -> torch.Tensor:
        world.optimizers[0].zero_grad()
        loss = (world.weight * 2).sum()
        loss.backward()
        world.buffer.fill_(3)
        return loss

    world.optimizers[0].step(closure)


def scaled_step(world: Stepped) -> None:
    scaler = torch.amp.GradScaler("cpu")
    for factor in (float("inf"), 1.0):
        world.optimizers[0].zero_grad()
        scaler.scale((world.weight * factor).sum()).backward()
        scaler.step(world.optimizers[0])
        scaler.update()


def step_of_a_copy(world: Stepped) -> None:
    """Of an optimizer that was not named: it has the same parameters and state, and no hooks of its own."""
    world.set_gradients()
    copy.copy(world.optimizers[1]).step()


def fused_step(world: Stepped) -> None:
    """Of one whose writes torch does not count."""
    world.set_gradients()
    torch.optim.SGD([world.weight, world.bias], lr=1.0, fused=True).step()


def accumulate(world: Stepped) -> None:
    for _ in range(3):
        (world.weight.sum() * world.bias.sum()).backward()
    world.optimizers[1].step()
    for optimizer in world.optimizers:
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "act", [swap_data, load_optimizer, step_with_closure, scaled_step, step_of_a_copy, fused_step, accumulate]
)
@pytest.mark.parametrize("is_held", [False, True])
def test_a_save_holds_its_cut_beside(
    world: Stepped, gate: StepGate, act: Callable[[Stepped], None], is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = world.values()
    if is_held:  # The background copies nothing before the training has gone on.
        monkeypatch.setattr(StepCopies, "run", lambda *_, **__: None)
    future = world.saver.save_async(1)
    world.buffer.fill_(9)
    act(world)
    world.step()
    world.check(future, 1, values)


def test_two_saves_before_a_step(world: Stepped, gate: StepGate) -> None:
    values = world.values()
    with gate.held():
        first = world.saver.save_async(1)
        world.buffer.fill_(8)
        second = world.saver.save_async(2)
        later = world.values()
        gate.await_copier()
        world.optimizers[1].step()
        gate.open()
        world.step()
    world.check(first, 1, values)
    world.check(second, 2, later)


def test_state_that_comes_with_the_first_step_is_in_later_saves(tmp_path: Path, gate: StepGate) -> None:
    parameter = torch.nn.Parameter(torch.arange(100.0))
    optimizer = torch.optim.Adam([parameter])
    with asyncckpt.Saver(
        path=tmp_path,
        tensors={"parameter": parameter, "optimizer": optimizer},
        device=asyncckpt.DeviceOptions(optimizers=[optimizer]),
    ) as saver:
        for step in range(3):
            before = copy.deepcopy((parameter.detach(), optimizer.state_dict()["state"]))
            future = saver.save_async(step)
            parameter.grad = torch.ones(100)
            optimizer.step()
            future.result(30)
            found = asyncckpt.load(tmp_path, step=step)
            assert torch.equal(found["parameter"].detach(), before[0])
            assert bool(step) == bool(before[1])
            for name, value in before[1].get(0, {}).items():
                assert torch.equal(found["optimizer"]["state"][0][name], value)


def test_what_an_optimizer_has_beside_the_state_is_not_asked_for(tmp_path: Path, gate: StepGate) -> None:
    """A parameter of it that is not saved, and a tensor that is saved and not its own."""
    saved, other = torch.nn.Parameter(torch.arange(100.0)), torch.nn.Parameter(torch.arange(50.0))
    alone = torch.arange(20.0)
    optimizer = torch.optim.SGD([saved, other], lr=1.0)
    with asyncckpt.Saver(
        path=tmp_path,
        tensors={"saved": saved, "alone": alone},
        device=asyncckpt.DeviceOptions(optimizers=[optimizer]),
    ) as saver:
        with gate.held():
            future = saver.save_async(1)
            alone.zero_()
            with torch.no_grad():
                other.zero_()
        future.result(30)
    assert torch.equal(asyncckpt.load(tmp_path)["alone"], torch.arange(20.0))


def test_an_inference_tensor_is_copied_in_the_call(tmp_path: Path) -> None:
    with torch.inference_mode():
        uncounted = torch.arange(50.0)
    parameter = torch.nn.Parameter(torch.arange(50.0))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.state[parameter]["momentum_buffer"] = uncounted
    state = {"parameter": parameter, "uncounted": uncounted}
    with asyncckpt.Saver(path=tmp_path, tensors=state, device=asyncckpt.DeviceOptions(optimizers=[optimizer])) as saver:
        future = saver.save_async(1)
        with torch.inference_mode():
            uncounted.zero_()
        future.result(30)
    assert torch.equal(asyncckpt.load(tmp_path)["uncounted"], torch.arange(50.0))
