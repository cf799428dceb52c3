"""Whatever becomes of tensors between two saves, each checkpoint holds what they were when it was made."""

from __future__ import annotations

import contextlib
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.errors import UnsupportedError, UsageError
from asyncckpt.plan import leaf_facts
from asyncckpt.plan.state import flatten
from tests.worlds.bits import bits, raw_of

SAVES = 40
State = dict[str, Any]
Change = Callable[[random.Random, State, str], object]


def fresh(draw: random.Random) -> torch.Tensor:
    """A tensor of one of a few shapes and dtypes, so that many have the same facts; some are views."""
    shape = draw.choice([(), (4,), (4, 6), (6, 4), (0, 3), (2, 2, 1, 1, 2, 3)])
    dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.int64, torch.complex64])
    tensor = torch.randint(-100, 100, shape).to(dtype)
    if tensor.dim() == 2 and draw.random() < 0.3:
        tensor = tensor.t().contiguous().t()
    if tensor.numel() and draw.random() < 0.2:
        tensor = torch.cat([tensor.flatten()] * 3)[tensor.numel() : 2 * tensor.numel()].view(shape)
    return tensor


def like(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Other values, often of the same facts."""
    if draw.random() < 0.3:
        return fresh(draw)
    other = tensor.detach().clone() + 1
    return torch._neg_view(other) if draw.random() < 0.3 else other


def set_data(draw: random.Random, state: State, name: str) -> None:
    other = fresh(draw)
    state[name].data = like(draw, state[name]) if other.is_complex() != state[name].is_complex() else other


def free_and_come_back(draw: random.Random, state: State, name: str) -> None:
    storage = state[name].untyped_storage()
    if storage.is_shared():
        raise RuntimeError("torch cannot give it back")
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    storage.fill_(1)  # All views of it, which other tensors may be.


CHANGES: dict[str, Change] = {
    "values": lambda draw, state, name: state[name].detach().add_(1),
    "replaced": lambda draw, state, name: state.__setitem__(name, like(draw, state[name])),
    "data": set_data,
    "set": lambda draw, state, name: state[name].set_(state[name].detach() + 1),
    "set to other": lambda draw, state, name: state[name].set_(fresh(draw).real.to(state[name].dtype)),
    "resized": lambda draw, state, name: state[name].resize_(3, 5).zero_(),
    "swapped": lambda draw, state, name: torch.utils.swap_tensors(state[name], like(draw, state[name])),
    "storage": free_and_come_back,
    "parameter": lambda draw, state, name: state.__setitem__(name, torch.nn.Parameter(state[name], False)),
    "shared memory": lambda draw, state, name: state[name].share_memory_(),
    "tied": lambda draw, state, name: state.__setitem__(draw.choice(list(state)), state[name]),
    "view of another": lambda draw, state, name: state.__setitem__(draw.choice(list(state)), state[name].detach()[...]),
    "conjugated": lambda draw, state, name: state.__setitem__(name, state[name].detach().conj()),
    "added": lambda draw, state, name: state.__setitem__(f"more{len(state)}", fresh(draw)),
    "removed": lambda draw, state, name: len(state) > 4 and state.pop(name),
}
REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "freed": lambda tensor: tensor.untyped_storage().resize_(0),
    "meta": lambda tensor: tensor.to("meta"),
    "sparse": lambda tensor: tensor.to_sparse(),
    "zeros without memory": lambda tensor: torch._efficientzerotensor(tuple(tensor.shape)),
    "functional": torch._to_functional_tensor,
    "not initialised": lambda tensor: torch.nn.UninitializedParameter(),
}


def mistakes(path: Path, seed: int) -> list[str]:
    """Save after random changes; return what was drawn before each save that another state came back from, or what has
    never been done.
    """
    done: set[str] = set()
    deck: list[str] = []
    draw = random.Random(seed)
    torch.manual_seed(seed)
    state: State = {f"t{number}": fresh(draw) for number in range(6)}
    found = []
    with asyncckpt.Saver(path=path, tensors=state, durability="none", keep=2) as saver:
        for step in range(SAVES):
            deck = deck or draw.sample(sorted(CHANGES), len(CHANGES))
            drawn = [deck.pop() for _ in range(min(len(deck), draw.choice([0, 1, 1, 2, 3])))]
            for change in drawn:
                name = draw.choice(list(state))
                with contextlib.suppress(RuntimeError):  # Torch does not allow each of each tensor.
                    CHANGES[change](draw, state, name)
                    done.add(change)
            future = saver.save_async(step)
            expected = bits(state)
            for tensor in state.values():  # Behind the fence.
                tensor.detach().mul_(2)
            future.result(60)
            if bits(asyncckpt.load(path, step=step)) != expected:
                found.append(f"seed {seed}, step {step}: {drawn}")
    return found + sorted(CHANGES.keys() - done)


@pytest.mark.parametrize("seed", range(6))
def test_each_checkpoint_holds_the_state_of_its_save(tmp_path: Path, seed: int) -> None:
    assert mistakes(tmp_path / "d", seed) == []


def test_a_fact_that_is_not_compared_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes negated and conjugated views for others."""
    monkeypatch.setattr(leaf_facts, "_is_neg", lambda tensor: False)
    monkeypatch.setattr(leaf_facts, "_COMPLEX", frozenset())
    assert any("step" in mistake for mistake in mistakes(tmp_path / "d", seed=1))


@pytest.mark.parametrize("deltas", [None, asyncckpt.DeltaPolicy()], ids=["full", "deltas"])
@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_what_cannot_be_saved_any_more_is_refused_and_named(
    tmp_path: Path, kind: str, deltas: asyncckpt.DeltaPolicy | None
) -> None:
    state = {"kept": torch.ones(4), "lost": torch.full((4, 6), 5.0)}
    with asyncckpt.Saver(path=tmp_path / "d", tensors=state, durability="none", deltas=deltas) as saver:
        for _ in range(3):
            saver.save_async().result(60)
        lost = state["lost"]
        changed = REFUSED[kind](lost)
        if isinstance(changed, torch.Tensor):
            state["lost"] = changed
        with pytest.raises((UsageError, UnsupportedError), match="lost"):
            saver.save_async()
        state["lost"] = torch.full((4, 6), 6.0)
        step = saver.save_async().result(60).step
    assert bits(asyncckpt.load(tmp_path / "d", step=step)) == bits(state)


class WithState:
    def state_dict(self) -> State:
        return {"w": torch.ones(3)}


KINDS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "number": lambda: 3,
    "tensor": lambda: torch.ones(2),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "array": lambda: np.ones(2),
    "scalar": lambda: np.float32(2),
    "empty dict": dict,
    "dict of a tensor": lambda: {"w": torch.ones(2)},
    "dict of a value": lambda: {"w": 1},
    "dict of a key that is equal": lambda: {1: torch.ones(2)},
    "dict of another key that is equal": lambda: {True: torch.ones(2)},
    "ordered": lambda: OrderedDict(w=torch.ones(2)),
    "counter": lambda: Counter(w=2),
    "list": lambda: [torch.ones(2)],
    "tuple": lambda: (torch.ones(2),),
    "module": lambda: torch.nn.Linear(1, 1),
    "object": WithState,
}


@pytest.mark.parametrize("after", KINDS)
@pytest.mark.parametrize("before", KINDS)
def test_anything_may_take_the_place_of_anything(before: str, after: str) -> None:
    """Beside an epoch, with which a mapping is not one of tensors alone."""
    earlier = flatten({"it": KINDS[before](), "epoch": 1}).tree
    state = {"it": KINDS[after](), "epoch": 1}
    found, expected = flatten(state, earlier), flatten(state)
    assert repr(found.tree) == repr(expected.tree)
    assert [*map(raw_of, found.tensors)] == [*map(raw_of, expected.tensors)]
    assert found.values == expected.values


def test_tensors_may_take_the_place_of_nothing(tmp_path: Path) -> None:
    """As those of an average that begins later."""
    state: State = {"average": None, "epoch": 1}
    with asyncckpt.Saver(path=tmp_path / "d", tensors=state, durability="none") as saver:
        saver.save_async(1).result(60)
        state["average"] = {"w": torch.ones(2)}
        saver.save_async(2).result(60)
    assert asyncckpt.load(tmp_path / "d")["average"]["w"].tolist() == [1.0, 1.0]
