"""What a signal handler changes while the call of a save waits, for an arena or a table, is looked at again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.model.write_block import WriteBlock
from asyncckpt.staging.pool import Arena
from tests.worlds.gates import Gate

WAIT_S_MAX = 60.0
SHAPE = 256, 256
Change = Callable[[torch.nn.Module], object]


class SignalOnce:
    """An object that, once, sends a signal to the process: its handler runs when the call that saves it waits."""

    is_due = False

    def state_dict(self) -> dict[str, int]:
        if self.is_due:
            self.is_due = False
            os.kill(os.getpid(), signal.SIGUSR1)
        return {"x": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError


class ChangedModel:
    """A model that the handler changes, and what the call waits for until it has."""

    def __init__(self) -> None:
        self.model = torch.nn.ParameterList([torch.full(SHAPE, float(number)) for number in range(4)])
        self.asking = SignalOnce()
        self.is_changed = threading.Event()
        self.change: Change = lambda model: None
        self.kept: list[torch.Tensor] = []

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "asking": self.asking}

    def handle(self, *_: object) -> None:
        self.change(self.model)
        self.kept += [torch.full(SHAPE, -7.0) for _ in range(16)]  # Where the model was before.
        self.is_changed.set()


@pytest.fixture
def world() -> Iterator[ChangedModel]:
    found = ChangedModel()
    before = signal.signal(signal.SIGUSR1, found.handle)
    yield found
    signal.signal(signal.SIGUSR1, before)


def waiting_for_an_arena(
    path: Path, world: ChangedModel, *, before: Callable[[], object] = lambda: None
) -> asyncckpt.SaveResult:
    def filter_func(blocks: list[WriteBlock]) -> list[WriteBlock]:
        assert world.is_changed.wait(WAIT_S_MAX)
        return blocks

    with asyncckpt.Saver(path=path, tensors=world.state, filter_func=filter_func, on_busy="queue") as saver:
        first = [saver.save_async(0), saver.save_async(1)]
        before()
        world.asking.is_due = True
        try:
            return saver.save_async(2).result(WAIT_S_MAX)
        finally:
            for future in first:
                future.result(WAIT_S_MAX)


def waiting_for_a_table(path: Path, world: ChangedModel) -> asyncckpt.SaveResult:
    begun = threading.Event()

    def first_rows(ids: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert world.is_changed.wait(WAIT_S_MAX)
        return torch.zeros(len(ids), 2)

    table = asyncckpt.HashTable("t", 2, initializer=first_rows)
    with asyncckpt.Saver(path=path, tensors=world.state, hashtables={"t": table}) as saver:
        for step in range(2):
            saver.save_async(step).result(WAIT_S_MAX)
        other = threading.Thread(target=table.lookup, args=(torch.arange(3),))
        other.start()
        assert begun.wait(WAIT_S_MAX)
        world.asking.is_due = True
        try:
            return saver.save_async(2).result(WAIT_S_MAX)
        finally:
            other.join()


def waiting_for_its_turn(path: Path, world: ChangedModel) -> asyncckpt.SaveResult:
    """A blocking save, queued after one that writes."""

    def filter_func(blocks: list[WriteBlock]) -> list[WriteBlock]:
        assert world.is_changed.wait(WAIT_S_MAX)
        return blocks

    with (
        asyncckpt.Saver(path=path / "other", tensors={"x": torch.ones(3)}, filter_func=filter_func) as other,
        asyncckpt.Saver(path=path, tensors=world.state, on_busy="queue") as saver,
    ):
        for step in range(2):
            saver.save(step)
        other.save_async(0)
        world.asking.is_due = True
        return saver.save(2)


WAITS = pytest.mark.parametrize("save", [waiting_for_an_arena, waiting_for_a_table])


@WAITS
def test_memory_that_is_another_one_is_read(
    tmp_path: Path, world: ChangedModel, save: Callable[[Path, ChangedModel], object]
) -> None:
    def change(model: torch.nn.Module) -> None:
        for number, parameter in enumerate(model.parameters()):
            parameter.data = torch.full(SHAPE, 100.0 + number)

    world.change = change
    save(tmp_path, world)
    found = asyncckpt.load(tmp_path, step=2)["model"]
    assert all(torch.equal(found[str(number)], torch.full(SHAPE, 100.0 + number)) for number in range(4))


@WAITS
def test_tensors_of_another_dtype_are_refused(
    tmp_path: Path, world: ChangedModel, save: Callable[[Path, ChangedModel], object]
) -> None:
    world.change = torch.nn.Module.half
    with pytest.raises(asyncckpt.UsageError, match=r"'model\.0' has become another one while the call"):
        save(tmp_path, world)
    assert asyncckpt.list_steps(tmp_path) == [0, 1]


def test_tensors_that_were_others_before_an_arena_was_awaited_are_saved(tmp_path: Path, world: ChangedModel) -> None:
    """The plan of an earlier save gives way to a new one before the call waits."""
    waiting_for_an_arena(tmp_path, world, before=world.model.half)
    found = asyncckpt.load(tmp_path, step=2)["model"]
    expected = [torch.full(SHAPE, float(number), dtype=torch.float16) for number in range(4)]
    assert all(torch.equal(found[str(number)], tensor) for number, tensor in enumerate(expected))


def test_tensors_of_another_dtype_are_refused_by_the_plan_of_the_save_itself(
    tmp_path: Path, world: ChangedModel
) -> None:
    """One tensor more, so the plan is made in the call."""

    class More(SignalOnce):
        def state_dict(self) -> dict[str, Any]:
            was_due = self.is_due
            return super().state_dict() | ({"more": torch.ones(2)} if was_due else {})

    world.asking = More()
    world.change = torch.nn.Module.half
    with pytest.raises(asyncckpt.UsageError, match=r"'model\.0' has become another one while the call"):
        waiting_for_an_arena(tmp_path, world)
    assert asyncckpt.list_steps(tmp_path) == [0, 1]


@WAITS
def test_what_is_not_tied_any_more_is_refused(
    tmp_path: Path, world: ChangedModel, save: Callable[[Path, ChangedModel], object]
) -> None:
    first, second, *_ = world.model
    second.data = first.data

    def change(model: torch.nn.Module) -> None:
        second.data = torch.full(SHAPE, 5.0)

    world.change = change
    if save is waiting_for_an_arena:  # Filters are given each tensor by itself.
        save(tmp_path, world)
        assert torch.equal(asyncckpt.load(tmp_path, step=2)["model"]["1"], second.detach())
        return
    with pytest.raises(asyncckpt.UsageError, match="share has changed while the call of a save waited"):
        save(tmp_path, world)


@pytest.mark.parametrize(
    "become",
    [torch.full((10, 10), 7.0), torch.full(SHAPE, 7.0, dtype=torch.float16), torch.full((256, 512), 7.0)[:, ::2]],
    ids=["smaller", "of another dtype", "strided"],
)
def test_a_blocking_save_refuses_tensors_that_became_others_while_it_waited(
    tmp_path: Path, world: ChangedModel, become: torch.Tensor
) -> None:
    def change(model: torch.nn.Module) -> None:
        next(model.parameters()).data = become

    world.change = change
    with pytest.raises(asyncckpt.UsageError, match=r"'model\.0' has become another one while the call"):
        waiting_for_its_turn(tmp_path, world)
    assert asyncckpt.list_steps(tmp_path) == [0, 1]


def test_a_plan_of_other_facts_serves_no_later_save(tmp_path: Path) -> None:
    """A tensor that is larger while the call waits for a table, and then has its size again."""
    tensor, table = torch.ones(1000), asyncckpt.HashTable("t", 2)
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}, tensors={"x": tensor, "n": 1}) as saver:
        for step in range(3):
            saver.save_async(step).result(WAIT_S_MAX)
        gate = Gate()

        def hold() -> None:
            cut = table.begin_cut()
            gate()
            tensor.data = torch.full((200_000,), 7.0)
            cut.fence()
            cut.end(False)

        other = threading.Thread(target=hold)
        other.start()
        assert gate.reached.wait(WAIT_S_MAX)
        threading.Timer(0.2, gate.open).start()
        with pytest.raises(asyncckpt.UsageError, match="'x' has become another one while the call"):
            saver.save_async(3).result(WAIT_S_MAX)
        other.join()
        for step in (4, 5):
            tensor.data = torch.full((1000,), float(step))
            saver.save_async(step).result(WAIT_S_MAX)
            assert torch.equal(asyncckpt.load(tmp_path, step=step)["x"], tensor)


@pytest.mark.parametrize("module", [False, True])
def test_memory_that_a_tensor_gets_while_the_arena_is_touched_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: bool
) -> None:
    tensor, kept = torch.nn.Parameter(torch.ones(SHAPE)), list[torch.Tensor]()
    state = torch.nn.ParameterDict({"x": tensor}) if module else {"x": tensor}
    ensure = Arena.ensure

    def touched(self: Arena, bytes: int, *, threads: int = 0) -> None:
        ensure(self, bytes, threads=threads)
        if step == 3:
            tensor.data = torch.full(SHAPE, 2.0)
            kept.extend(torch.full(SHAPE, -7.0) for _ in range(16))  # Where it was before.

    monkeypatch.setattr(Arena, "ensure", touched)
    with asyncckpt.Saver(path=tmp_path, tensors={"state": state}) as saver:
        for step in range(4):
            saver.save_async(step).result(WAIT_S_MAX)
    assert torch.equal(asyncckpt.load(tmp_path)["state"]["x"], torch.full(SHAPE, 2.0))
