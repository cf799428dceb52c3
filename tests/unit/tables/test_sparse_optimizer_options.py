"""Every option of torch's optimizers does in a sparse one what it does there, or is refused by name before a step."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from asyncckpt.errors import UsageError
from asyncckpt.tables import HashEmbedding, HashTable, SparseAdagrad, SparseAdam, SparseAdamW, SparseSGD
from tests.shares import slow_but_for_a_share

IDS = torch.arange(4)
ABSENT_OPTIONS = {
    "amsgrad",
    "capturable",
    "dampening",
    "decoupled_weight_decay",
    "differentiable",
    "initial_accumulator_value",
    "maximize",
}
PAIRS: dict[str, tuple[Any, Any]] = {
    "sgd": (SparseSGD, torch.optim.SGD),
    "adagrad": (SparseAdagrad, torch.optim.Adagrad),
    "adam": (SparseAdam, torch.optim.Adam),
    "adamw": (SparseAdamW, torch.optim.AdamW),
}
# Of these, torch has no other values, or they only choose how it computes.
SPEED = {"foreach", "fused"}
VALUES: dict[str, Callable[[random.Random], Any]] = {
    "lr": lambda chosen: chosen.choice([0.1, torch.tensor(0.05), 1]),
    "betas": lambda chosen: (chosen.choice([0.5, 0.0]), 0.9),
    "eps": lambda chosen: 0.01,
    "momentum": lambda chosen: chosen.choice([0.0, 0.9]),
    "weight_decay": lambda chosen: 0.1,
    "lr_decay": lambda chosen: 0.2,
    "initial_accumulator_value": lambda chosen: 0.3,
    "dampening": lambda chosen: 0.5,
}


def options_of(kind: str) -> list[str]:
    return [name for name in inspect.signature(PAIRS[kind][1]).parameters if name not in {"params", *SPEED}]


def drawn(kind: str, chosen: random.Random) -> dict[str, Any]:
    """Some options, most of which both have."""
    names = [name for name in options_of(kind) if name not in ABSENT_OPTIONS or chosen.random() < 0.1]
    some = [name for name in names if chosen.random() < 0.5]
    return {name: VALUES.get(name, lambda one: one.choice([True, False]))(chosen) for name in some}


class Twins:
    """A table and a dense embedding, with the same rows."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, (self.sparse_kind, self.dense_kind) = kind, PAIRS[kind]
        rows = torch.randn(len(IDS), 3, generator=torch.Generator().manual_seed(seed))
        table = HashTable("t", 3, optimizer_slots=self.sparse_kind.optimizer_slots())
        table.insert(IDS, rows)
        self.table, self.sparse, self.dense = table, HashEmbedding(table), nn.Embedding.from_pretrained(rows, False)
        self.optimizers: list[torch.optim.Optimizer] = []

    def make(self, defaults: dict[str, Any], group: dict[str, Any]) -> None:
        modules = ((self.sparse_kind, self.sparse), (self.dense_kind, self.dense.parameters()))
        self.optimizers = [made([{"params": params, **group}], **defaults) for made, params in modules]

    def step(self) -> None:
        for module, optimizer in zip((self.sparse, self.dense), self.optimizers, strict=True):
            module(IDS).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def check(self) -> None:
        torch.testing.assert_close(self.table.read(IDS)["embedding"], self.dense.weight.detach())


@pytest.mark.parametrize("seed", slow_but_for_a_share(range(20), "options", every=4))
@pytest.mark.parametrize("kind", PAIRS)
def test_random_options_give_what_torch_gives_or_are_refused(kind: str, seed: int) -> None:
    """In the constructor, in a group, set later, and in a state that is loaded."""
    chosen, twins = random.Random(f"{kind} {seed}"), Twins(kind, seed)
    defaults = {name: value for name, value in drawn(kind, chosen).items() if name not in ABSENT_OPTIONS}
    group, later = drawn(kind, chosen), drawn(kind, chosen)
    print(f"kind {kind!r}, seed {seed}: {defaults}, {group}, {later}")
    before = twins.table.read(IDS)["embedding"]
    try:
        twins.make(defaults, group)
    except (UsageError, ValueError):
        refused = {name for name in group if name in ABSENT_OPTIONS and group[name]}
        assert refused or (defaults.get("nesterov") and not defaults.get("momentum"))
        assert twins.table.read(IDS)["embedding"].equal(before)
        return
    for _ in range(3):
        twins.step()
    twins.check()
    absent = sorted(name for name in later if name in ABSENT_OPTIONS and later[name])
    if chosen.random() < 0.5:
        states = [deepcopy(optimizer.state_dict()) for optimizer in twins.optimizers]
        for state in states:
            state["param_groups"][0].update(later)
        if absent:
            with pytest.raises(UsageError, match=f"option '{absent[0]}' of a sparse optimizer does not exist"):
                twins.optimizers[0].load_state_dict(states[0])
            return
        for optimizer, state in zip(twins.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
    else:
        for optimizer in twins.optimizers:
            optimizer.param_groups[0].update(later)
        if absent:
            now = twins.table.read(IDS)["embedding"]
            with pytest.raises(UsageError, match=f"option '{absent[0]}' of a sparse optimizer does not exist"):
                twins.step()
            assert twins.table.read(IDS)["embedding"].equal(now)
            return
    for _ in range(3):
        twins.step()
    twins.check()


@pytest.mark.parametrize("kind", PAIRS)
def test_every_option_of_torch_is_known_or_refused(kind: str) -> None:
    """So that what a later torch has is looked at."""
    known = set(inspect.signature(PAIRS[kind][0]).parameters) | ABSENT_OPTIONS
    assert set(options_of(kind)) <= known
    for name in sorted(ABSENT_OPTIONS):
        twins = Twins(kind, 0)
        with pytest.raises(UsageError, match=f"option '{name}' of a sparse optimizer does not exist"):
            twins.sparse_kind([{"params": twins.sparse, name: True}])
        twins.sparse_kind([{"params": twins.sparse, name: False}])


def test_nesterov_without_a_momentum_is_refused_as_by_torch() -> None:
    twins = Twins("sgd", 0)
    with pytest.raises(UsageError, match="nesterov of a sparse optimizer needs a momentum"):
        SparseSGD(twins.sparse, nesterov=True)
    twins.make({"lr": 0.1}, {"nesterov": True})
    twins.step()
    twins.check()
