"""What a save with `optimizers=` promises of a state on the host, one promise at a time."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.devices.step_copies import StepCopies
from asyncckpt.staging.pool import pool
from tests.devices.training import differing
from tests.steps import gate as gates
from tests.steps.gate import Gate

pytestmark = pytest.mark.any_core

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = gates.install(monkeypatch)
    yield made
    made.open()


class World:
    """Two parameters with an optimizer each, a buffer, and a Saver of all that."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.weight = torch.nn.Parameter(torch.arange(300.0))
        self.bias = torch.nn.Parameter(torch.arange(90.0))
        self.buffer = torch.arange(5.0)
        self.optimizers = [
            torch.optim.Adam([self.weight], lr=0.5, foreach=False),
            torch.optim.SGD([self.bias], lr=0.5, momentum=0.9),
        ]
        self.step()
        self.saver = asyncckpt.Saver(
            path=path,
            tensors=self.state,
            device=asyncckpt.DeviceOptions(optimizers=self.optimizers),
            on_busy="queue",
            **options,
        )
        self.saver.save_async(0).result(30)

    @property
    def state(self) -> dict[str, Any]:
        return {
            "weight": self.weight,
            "bias": self.bias,
            "buffer": self.buffer,
            "adam": self.optimizers[0],
            "sgd": self.optimizers[1],
        }

    def values(self) -> Tensors:
        named = {"weight": self.weight, "bias": self.bias, "buffer": self.buffer}
        named |= {f"adam.{name}": value for name, value in self.optimizers[0].state[self.weight].items()}
        named["sgd.momentum"] = self.optimizers[1].state[self.bias]["momentum_buffer"]
        return {name: tensor.detach().clone() for name, tensor in named.items()}

    def loaded(self, step: int) -> Tensors:
        tree = asyncckpt.load(self.path, step=step)
        found = {name: tree[name].detach() for name in ("weight", "bias", "buffer")}
        found |= {f"adam.{name}": value for name, value in tree["adam"]["state"][0].items()}
        found["sgd.momentum"] = tree["sgd"]["state"][0]["momentum_buffer"]
        return found

    def set_gradients(self) -> None:
        for parameter in (self.weight, self.bias):
            parameter.grad = torch.ones_like(parameter)

    def step(self) -> None:
        self.set_gradients()
        for optimizer in self.optimizers:
            optimizer.step()

    def check(self, future: asyncckpt.SaveFuture, step: int, values: Tensors) -> asyncckpt.SaveResult:
        result = future.result(30)
        assert differing(self.loaded(step), values) == []
        return result


@pytest.fixture
def world(tmp_path: Path, gate: Gate) -> Iterator[World]:
    made = World(tmp_path)
    gate.log.clear()
    yield made
    gate.open()
    made.saver.close()


def test_a_step_copies_what_is_left(world: World, gate: Gate) -> None:
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


def opened_when_all_is_begun(world: World, gate: Gate) -> None:
    """Open the gate when the step has nothing left to do but to wait for the chunk of the background."""
    (pending,) = world.saver._target.step_fences._pending
    part = pending.steps._parts[0]
    with pending.steps._changed:
        assert pending.steps._changed.wait_for(lambda: not part.chunks, 30)
    gate.open()


def test_a_step_waits_for_the_chunk_of_the_background(world: World, gate: Gate) -> None:
    world.optimizers[0].register_step_pre_hook(lambda *_: gate.log.append("written"))
    with gate.held():
        future = world.saver.save_async(1)
        gate.await_copier()
        threading.Thread(target=opened_when_all_is_begun, args=(world, gate)).start()
        world.step()
    future.result(30)
    assert "background" in gate.log[: gate.log.index("written")]


def test_a_step_waits_for_nothing_of_other_optimizers(world: World, gate: Gate) -> None:
    values = world.values()
    with gate.held():
        future = world.saver.save_async(1)
        gate.await_copier()  # Before a chunk of the first one.
        world.bias.grad = torch.ones_like(world.bias)
        world.optimizers[1].step()
    world.check(future, 1, values)


def test_the_background_copies_what_no_step_asks_for(world: World, gate: Gate) -> None:
    values = world.values()
    world.check(world.saver.save_async(1), 1, values)
    assert set(gate.log) == {"background"}


def test_the_background_copies_in_the_order_of_the_last_steps(world: World) -> None:
    assert world.saver._target.step_fences._order == [0, 1]
    world.optimizers[0].step()
    assert world.saver._target.step_fences._order == [1, 0]


def test_what_is_changed_otherwise_is_refused_by_name(world: World, gate: Gate) -> None:
    with gate.held():
        future = world.saver.save_async(1)
        with torch.no_grad():
            world.bias.add_(1)
        world.optimizers[1].step()
    with pytest.raises(asyncckpt.UsageError, match=r"tensor 'bias' was changed behind the call.*wait_staged"):
        future.result(30)
    assert asyncckpt.list_steps(world.path) == [0]
    values = world.values()
    world.check(world.saver.save_async(2), 2, values)


def test_what_is_changed_without_a_step_is_refused_at_the_commit(world: World, gate: Gate) -> None:
    with gate.held():
        future = world.saver.save_async(1)
        world.optimizers[0].state[world.weight]["exp_avg"].zero_()
    with pytest.raises(asyncckpt.UsageError, match="exp_avg"):
        future.result(30)


def test_a_state_that_is_staged_may_be_changed_by_anything(world: World, gate: Gate) -> None:
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
    world = World(tmp_path)
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


def test_freed_memory_is_refused_by_name(world: World, gate: Gate) -> None:
    with gate.held():
        future = world.saver.save_async(1)
        gate.await_copier()
        world.bias.untyped_storage().resize_(0)
    with pytest.raises(asyncckpt.UsageError, match="memory of tensor 'bias' was freed or moved"):
        future.result(30)
    world.bias.untyped_storage().resize_(90 * 4)


def swap_data(world: World) -> None:
    world.weight.data = torch.zeros(300)
    world.optimizers[0].state[world.weight]["exp_avg"].data = torch.zeros(300)


def load_optimizer(world: World) -> None:
    content = copy.deepcopy(world.optimizers[0].state_dict())
    content["state"][0]["exp_avg"].zero_()
    world.optimizers[0].load_state_dict(content)


def step_with_closure(world: World) -> None:
    def closure() -> torch.Tensor:
        world.optimizers[0].zero_grad()
        loss = (world.weight * 2).sum()
        loss.backward()
        world.buffer.fill_(3)
        return loss

    world.optimizers[0].step(closure)


def scaled_step(world: World) -> None:
    scaler = torch.amp.GradScaler("cpu")
    for factor in (float("inf"), 1.0):
        world.optimizers[0].zero_grad()
        scaler.scale((world.weight * factor).sum()).backward()
        scaler.step(world.optimizers[0])
        scaler.update()


def step_of_a_copy(world: World) -> None:
    """Of an optimizer that was not named: it has the same parameters and state, and no hooks of its own."""
    world.set_gradients()
    copy.copy(world.optimizers[1]).step()


def fused_step(world: World) -> None:
    """Of one whose writes torch does not count."""
    world.set_gradients()
    torch.optim.SGD([world.weight, world.bias], lr=1.0, fused=True).step()


def accumulate(world: World) -> None:
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
    world: World, gate: Gate, act: Callable[[World], None], is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = world.values()
    if is_held:  # The background copies nothing before the training has gone on.
        monkeypatch.setattr(StepCopies, "run", lambda *_, **__: None)
    future = world.saver.save_async(1)
    world.buffer.fill_(9)
    act(world)
    world.step()
    world.check(future, 1, values)


def test_two_saves_before_a_step(world: World, gate: Gate) -> None:
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


def test_state_that_comes_with_the_first_step_is_in_later_saves(tmp_path: Path, gate: Gate) -> None:
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


def test_what_an_optimizer_has_beside_the_state_is_not_asked_for(tmp_path: Path, gate: Gate) -> None:
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_steps_without_its_parents_save(world: World, gate: Gate) -> None:
    values = world.values()
    with gate.held():
        future = world.saver.save_async(1)
        gate.await_copier()
        child = os.fork()
        if not child:
            world.optimizers[1].step()
            os._exit(0 if gate.log.count("step") == 0 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert world.saver._target.step_fences._pending
    world.check(future, 1, values)


def test_a_cancelled_save_gives_its_arena_back(world: World, gate: Gate) -> None:
    with gate.held():
        future = world.saver.save_async(1)
        gate.await_copier()
        assert future.cancel()
    with pytest.raises(asyncckpt.SaveCancelledError):
        future.result(30)
    world.saver.wait_idle()
    assert pool.statistics().arenas_count <= 2
    values = world.values()
    world.check(world.saver.save_async(2), 2, values)


def test_nothing_of_a_state_is_kept_behind_the_step(world: World, gate: Gate) -> None:
    future = world.saver.save_async(1)
    old = weakref.ref(world.optimizers[0].state[world.weight]["exp_avg"].untyped_storage())
    load_optimizer(world)
    world.step()
    future.result(30)
    del future
    world.saver.wait_idle()
    gc.collect()
    assert old() is None


def test_steps_of_others_may_have_any_tensors(world: World, gate: Gate) -> None:
    """A hook of ours looks at all of them, and must not fail there."""
    sparse = torch.zeros(3, 3).to_sparse().requires_grad_()
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    other.param_groups[0]["params"].append(sparse)
    with gate.held():
        future = world.saver.save_async(1)
        other.step()
    future.result(30)


def test_ctrl_c_ends_a_wait_and_nothing_else(world: World, gate: Gate) -> None:
    values = world.values()
    world.weight.grad = torch.ones(300)
    with gate.held():
        future = world.saver.save_async(1)
        gate.await_copier()
        (pending,) = world.saver._target.step_fences._pending

        def interrupt() -> None:
            with pending.steps._changed:
                assert pending.steps._changed.wait_for(lambda: not pending.steps._parts[0].chunks, 30)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            world.optimizers[0].step()
        thread.join(30)
        assert torch.equal(world.weight.detach(), values["weight"])
    world.step()
    world.check(future, 1, values)


def test_nothing_of_a_saver_stays_behind_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    fences = weakref.ref(world.saver._target.step_fences)
    world.saver.close()
    del world
    until = time.monotonic() + 30.0
    while fences() is not None and time.monotonic() < until:  # The thread that has ended its save lets go of it.
        gc.collect()
        time.sleep(0.01)
    assert fences() is None
