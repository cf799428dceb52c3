"""Modules that are read past their state_dict() are saved as what that would have returned."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.format.tree import Node
from asyncckpt.plan import module_state
from asyncckpt.plan import state as plan_state
from asyncckpt.plan.state import FlatState, flatten
from tests.end_to_end.registered import CHANGES, RegisteredState, train

STEPS = 40
# What torch raises where it does not allow a change of what earlier changes made, and we for what cannot be saved.
NOT_ALLOWED = (RuntimeError, AttributeError, TypeError, KeyError, ValueError, IndexError, asyncckpt.CheckpointError)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Walk:
    """Walks of one Saver, each with the tree of the one before."""

    def __init__(self) -> None:
        self.tree: Node | None = None
        self.kept_count = 0

    def flatten(self, state: Any) -> FlatState:
        flat = flatten(state, self.tree)
        self.kept_count += flat.tree is self.tree
        self.tree = flat.tree
        return flat


def asked(state: Any) -> FlatState:
    """Flatten a state whose modules are all asked for theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_state, "state_of", lambda owner: owner.state_dict())
        return flatten(state)


def contents(flat: FlatState) -> object:
    """Everything that a save takes from a flattened state, and the values of its tensors."""
    return (
        flat.tree,
        repr(flat.tree),
        [(type(value), str(value)) for value in flat.values],
        flat.encoded_values(),
        [(path, id(owner)) for path, owner in flat.stateful],
        sorted(flat.originals),
        [(t.dtype, t.shape, t.stride(), t.detach().clone().tolist()) for t in flat.tensors],
    )


def run_of(seed: int, seen: Callable[[RegisteredState, str], None]) -> None:
    """Change a world at random; `seen` it after every few changes, with what they were."""
    world, deck = RegisteredState(seed), list[str]()
    try:
        for step in range(STEPS):
            deck = deck or world.draw.sample(sorted(CHANGES), len(CHANGES))
            # Once for each change the state is seen twice, so that there is a walk to follow.
            drawn = [deck.pop() for _ in range(min(len(deck), world.draw.choice([0, 0, 1, 1, 2, 3])))]
            for change in ["a step"] * world.draw.randrange(2) + drawn:
                with contextlib.suppress(*NOT_ALLOWED):
                    CHANGES[change](world)
            if step % 8 == 7:
                world.restore()
                world.begin()
            seen(world, f"seed {seed}, step {step}: {drawn}")
    finally:
        world.restore()


def is_alike(walk: Walk, world: RegisteredState) -> bool:
    """Whether walks give the same, whatever they know; hooks that change the state may come between two of them."""
    ways: list[Callable[[Any], FlatState]] = [walk.flatten, flatten, asked]
    found = [outcome(way, world.state) for way in ways]
    return found[0] == found[1] == found[2] or any(module._state_dict_pre_hooks for module in world.module.modules())


def outcome(function: Callable[[Any], FlatState], state: Any) -> object:
    try:
        return contents(function(state))
    except NOT_ALLOWED as error:
        return type(error), str(error)


def mistakes(seed: int) -> tuple[list[str], int]:
    """Flatten with the tree before, without, and by asking; return where they differ, and how often the tree stayed."""
    walk, found = Walk(), list[str]()

    def seen(world: RegisteredState, drawn: str) -> None:
        if not is_alike(walk, world):
            found.append(drawn)

    run_of(seed, seen)
    return found, walk.kept_count


@pytest.mark.parametrize("seed", range(12))
def test_what_is_read_with_the_tree_before_is_what_objects_would_say(seed: int) -> None:
    found, kept_count = mistakes(seed)
    assert found == []
    assert kept_count > STEPS / 8


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_each_change_is_seen(change: str) -> None:
    world, walk = RegisteredState(1), Walk()
    try:
        for _ in range(3):
            train(world)
            walk.flatten(world.state)
        assert walk.kept_count == 2
        CHANGES[change](world)
        assert is_alike(walk, world)
        assert is_alike(walk, world)
    finally:
        world.restore()


NO_CHECKS: dict[str, tuple[object, str, object]] = {
    "methods of classes": (module_state, "_TORCHS_OWN", {}),
    "methods of objects": (module_state, "_NOT_OF_OBJECTS", frozenset()),
    "hooks": (module_state, "_attributes_of", lambda attributes: without_hooks(attributes)),
    "what is not saved": (module_state, "_attributes_of", lambda attributes: all_saved(attributes)),
    "trees": (plan_state, "_are_same", lambda items, others: len(items) == len(others)),
}
PARTS = module_state._attributes_of


def without_hooks(attributes: dict[str, Any]) -> Any:
    parameters, buffers, modules, *_, not_saved = PARTS(attributes)
    return parameters, buffers, modules, {}, {}, not_saved


def all_saved(attributes: dict[str, Any]) -> Any:
    return (*PARTS(attributes)[:-1], set())


@pytest.mark.parametrize("check", sorted(NO_CHECKS))
def test_a_check_that_is_left_out_would_be_found(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, forgotten = NO_CHECKS[check]
    monkeypatch.setattr(owner, name, forgotten)
    assert any(mistakes(seed)[0] for seed in range(25))


def plain(value: Any) -> Any:
    """A state as it comes back: objects as what their state_dict() returns."""
    if isinstance(value, torch.nn.DataParallel):
        value = value.module
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return torch.as_tensor(value).detach().clone()
    if hasattr(value, "state_dict"):
        value = dict(value.state_dict())
    if isinstance(value, dict):
        return type(value)((key, plain(item)) for key, item in value.items())
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        found = torch.as_tensor(other)
        return one.dtype == found.dtype and torch.equal(one, found)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("seed", range(4))
def test_each_checkpoint_holds_what_state_dict_would_have_returned(tmp_path: Path, seed: int) -> None:
    found = list[str]()
    world_of: list[RegisteredState] = []
    savers: list[asyncckpt.Saver] = []

    def seen(world: RegisteredState, drawn: str) -> None:
        if not savers:
            world_of.append(world)
            savers.append(asyncckpt.Saver(path=tmp_path / "d", tensors=world.state, durability="none", keep=2))
        if any(module._state_dict_pre_hooks for module in world.module.modules()):
            return
        try:
            expected = plain(world.state)
        except NOT_ALLOWED:
            return
        try:
            future = savers[0].save_async()
        except asyncckpt.CheckpointError as error:
            found.append(f"{drawn}: {error}")
            return
        for parameter in world.module.parameters():  # Behind the fence.
            parameter.detach().mul_(2)
        result = future.result(60)
        if not same(expected, asyncckpt.load(tmp_path / "d", step=result.step)):
            found.append(drawn)

    try:
        run_of(seed, seen)
    finally:
        for saver in savers:
            saver.close()
    assert found == []


class _Position:
    """Writes its position beside itself when it is asked, as a data loader may."""

    def __init__(self, beside: dict[str, Any]) -> None:
        self.number, self.beside = 10, beside

    def state_dict(self) -> dict[str, Any]:
        self.beside["number"] = self.number
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def test_what_a_part_changes_beside_itself_is_that_of_the_same_save(tmp_path: Path) -> None:
    meta: dict[str, Any] = {"number": 0, "x": torch.ones(3)}
    reader = _Position(meta)
    with asyncckpt.Saver(path=tmp_path, tensors={"reader": reader, "meta": meta}) as saver:
        for step in range(4):
            reader.number = 10 + step
            saver.save(step)
            loaded = asyncckpt.load(tmp_path, step=step)
            assert loaded["reader"]["number"] == loaded["meta"]["number"] == 10 + step


class _Renames:
    """Gives an entry beside it another name, the first time that it is asked."""

    def __init__(self, beside: dict[str, Any]) -> None:
        self.beside = beside

    def state_dict(self) -> dict[str, Any]:
        if "old" in self.beside:
            self.beside["new"] = self.beside.pop("old")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_an_entry_that_is_renamed_meanwhile_has_its_new_name_from_then_on(tmp_path: Path) -> None:
    beside: dict[str, Any] = {"old": torch.ones(3)}
    with asyncckpt.Saver(path=tmp_path, tensors={"beside": beside, "renames": _Renames(beside)}) as saver:
        for step in range(3):
            saver.save(step)
    assert list(asyncckpt.load(tmp_path, step=2)["beside"]) == ["new"]


def test_a_module_that_is_nested_deeply_is_read(tmp_path: Path) -> None:
    module: torch.nn.Module = torch.nn.Linear(2, 2)
    for _ in range(400):
        module = torch.nn.Sequential(module)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        with asyncckpt.Saver(path=tmp_path, tensors={"m": module}) as saver:
            saver.save(1)
            saver.save(2)
    finally:
        sys.setrecursionlimit(limit)
    assert len(asyncckpt.load(tmp_path, step=2)["m"]) == 2
