"""However a save with `optimizers=` ends, and whoever steps meanwhile: nothing stays behind, nobody waits in vain."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.devices import watches
from asyncckpt.engine.save.save_job import SaveJob
from asyncckpt.staging.pool import pool
from tests.steps.gate import StepGate, fences_of
from tests.steps.world import Stepped, check_swapped, load_optimizer

pytestmark = pytest.mark.any_core


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_steps_without_its_parents_save(world: Stepped, gate: StepGate) -> None:
    values = world.values()
    with gate.held():
        future = world.saver.save_async(1)
        gate.await_copier()
        child = os.fork()
        if not child:
            world.optimizers[1].step()
            os._exit(0 if gate.log.count("step") == 0 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert fences_of(world.saver)._pending
    world.check(future, 1, values)


def test_a_cancelled_save_gives_its_arena_back(world: Stepped, gate: StepGate) -> None:
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


def test_nothing_of_a_state_is_kept_behind_the_step(world: Stepped, gate: StepGate) -> None:
    future = world.saver.save_async(1)
    old = weakref.ref(world.optimizers[0].state[world.weight]["exp_avg"].untyped_storage())
    load_optimizer(world)
    world.step()
    future.result(30)
    del future
    world.saver.wait_idle()
    gc.collect()
    assert old() is None


def test_steps_of_others_may_have_any_tensors(world: Stepped, gate: StepGate) -> None:
    """A hook of ours looks at all of them, and must not fail there."""
    sparse = torch.zeros(3, 3).to_sparse().requires_grad_()
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    other.param_groups[0]["params"].append(sparse)
    with gate.held():
        future = world.saver.save_async(1)
        other.step()
    future.result(30)


def test_ctrl_c_ends_a_wait_and_nothing_else(world: Stepped, gate: StepGate) -> None:
    values = world.values()
    world.weight.grad = torch.ones(300)
    with gate.held():
        future = world.saver.save_async(1)
        gate.await_copier()
        (pending,) = fences_of(world.saver)._pending

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
    world = Stepped(tmp_path)
    fences = weakref.ref(fences_of(world.saver))
    world.saver.close()
    del world
    until = time.monotonic() + 30.0
    while fences() is not None and time.monotonic() < until:  # The thread that has ended its save lets go of it.
        gc.collect()
        time.sleep(0.01)
    assert fences() is None


def test_an_optimizer_without_a_hash_steps(world: Stepped, gate: StepGate) -> None:
    class Unhashable(torch.optim.SGD):
        def __eq__(self, other: object) -> bool:
            return self is other

    other = Unhashable([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    values = world.values()
    with gate.held():
        future = world.saver.save_async(1)
        gate.await_copier()
        other.step()
    world.check(future, 1, values)


class _NoAddress(torch.Tensor):
    """A tensor whose address nobody may ask for."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.data_ptr:
            raise TypeError("no address of this")
        return super().__torch_function__(function, types, args, kwargs or {})


def _lazy() -> torch.optim.Optimizer:
    return torch.optim.SGD(torch.nn.LazyLinear(3).parameters(), lr=1.0)


def _without_address() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2).as_subclass(_NoAddress))], lr=1.0)  # type: ignore[arg-type]


def _with_a_list() -> torch.optim.Optimizer:
    class Listed(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            return None

    made = Listed([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    made.state = [1, 2]  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("make", [_lazy, _without_address, _with_a_list])
def test_optimizers_like_no_others_step(
    world: Stepped, gate: StepGate, make: Callable[[], torch.optim.Optimizer]
) -> None:
    other, values = make(), world.values()
    with gate.held():
        future = world.saver.save_async(1)
        gate.await_copier()
        other.step()
    world.check(future, 1, values)


@pytest.mark.parametrize("make", [_lazy, _without_address, _with_a_list])
def test_optimizers_like_no_others_may_be_waited_for(
    tmp_path: Path, gate: StepGate, make: Callable[[], torch.optim.Optimizer]
) -> None:
    weight, other = torch.nn.Parameter(torch.ones(90)), make()
    device = asyncckpt.DeviceOptions(optimizers=[torch.optim.SGD([weight], lr=1.0), other])
    with asyncckpt.Saver(path=tmp_path, tensors={"weight": weight}, device=device) as saver:
        with gate.held():
            future = saver.save_async(1)
            gate.await_copier()
            other.step()
        future.result(30)


@pytest.mark.parametrize("writes", [False, True])
def test_a_tensor_that_is_swapped_is_watched(tmp_path: Path, gate: StepGate, writes: bool) -> None:
    weight, other = torch.nn.Parameter(torch.arange(300.0)), torch.nn.Parameter(torch.zeros(300))
    values = weight.detach().clone()
    check_swapped(tmp_path, gate, {"weight": weight}, weight, other, writes=writes, name="weight")
    assert writes or torch.equal(asyncckpt.load(tmp_path, step=1)["weight"].detach(), values)


def test_what_a_step_has_left_behind_is_as_it_was(tmp_path: Path, gate: StepGate) -> None:
    weight = torch.nn.Parameter(torch.arange(300.0))
    optimizer, values = torch.optim.SGD([weight], lr=1.0), torch.arange(300.0)
    weight.grad = torch.ones(300)
    device = asyncckpt.DeviceOptions(optimizers=[optimizer])
    with asyncckpt.Saver(path=tmp_path, tensors={"weight": weight}, device=device) as saver:
        future = saver.save_async(1)
        weight.data = weight.data.clone()
        optimizer.step()
        future.result(30)
    assert torch.equal(asyncckpt.load(tmp_path, step=1)["weight"].detach(), values)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no signal for users")
def test_a_handler_that_saves_while_a_step_waits_has_what_was_there(world: Stepped, gate: StepGate) -> None:
    values, saved = world.values(), list[asyncckpt.SaveFuture]()

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.2)
        gate.open()

    before = signal.signal(signal.SIGUSR1, lambda *_: saved.append(world.saver.save_async(2)))
    try:
        with gate.held():
            future = world.saver.save_async(1)
            gate.await_copier()
            threading.Timer(0.2, interrupt).start()
            world.step()
    finally:
        signal.signal(signal.SIGUSR1, before)
    world.check(future, 1, values)
    world.check(saved[0], 2, values)


def test_a_write_that_torch_counts_late_is_seen(
    tmp_path: Path, gate: StepGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, ended = torch.nn.Parameter(torch.arange(300.0)), list[float]()
    counts_of, begin_commit = watches._versions, SaveJob.begin_commit
    is_over = lambda: bool(ended) and time.monotonic() > ended[0]  # noqa: E731

    async def write_meanwhile(job: SaveJob) -> None:
        ended.append(job.staged_at + 0.1)  # By the clock of that wait: this thread may be late.
        await begin_commit(job)

    monkeypatch.setattr(SaveJob, "begin_commit", write_meanwhile)
    monkeypatch.setattr(watches, "_versions", lambda of: [count + is_over() for count in counts_of(of)])
    device = asyncckpt.DeviceOptions(optimizers=[torch.optim.SGD([weight], lr=1.0)])
    with asyncckpt.Saver(path=tmp_path, tensors={"weight": weight}, device=device, durability="none") as saver:
        future = saver.save_async(1)
        with pytest.raises(asyncckpt.UsageError, match="'weight' was changed between save_async"):
            future.result(30)
