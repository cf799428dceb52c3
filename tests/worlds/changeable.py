"""Models that change between a save and a load: tables, layers, optimizers, groups, schedules, dtypes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import asyncckpt
from asyncckpt import optim
from asyncckpt.nn import HashEmbeddingBag

SPARSE = {"sgd": optim.SparseSGD, "adagrad": optim.SparseAdagrad, "adam": optim.SparseAdam}
DENSE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda them: torch.optim.SGD(them, lr=0.1, momentum=0.9),
    "adam": lambda them: torch.optim.Adam(them),
    "adamw": lambda them: torch.optim.AdamW(them),
    "radam": lambda them: torch.optim.RAdam(them),
    "rmsprop": lambda them: torch.optim.RMSprop(them),
    "adagrad": lambda them: torch.optim.Adagrad(them),
}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda it: torch.optim.lr_scheduler.StepLR(it, 2),
    "exponential": lambda it: torch.optim.lr_scheduler.ExponentialLR(it, 0.9),
    "cosine": lambda it: torch.optim.lr_scheduler.CosineAnnealingLR(it, 9),
    "plateau": lambda it: torch.optim.lr_scheduler.ReduceLROnPlateau(it),
    "lambda": lambda it: torch.optim.lr_scheduler.LambdaLR(it, lambda _: 0.5),
}


@dataclass(frozen=True)
class Facts:
    """What a model is made of. order: of parameters in the dense optimizer, by layers."""

    tables: dict[str, int] = field(default_factory=lambda: {"user": 4, "item": 4})
    rule: str = "adagrad"
    layers: dict[str, int] = field(default_factory=lambda: {"a": 4, "b": 4, "c": 2})
    order: tuple[str, ...] = ("a", "b", "c")
    dense: str = "adam"
    groups: int = 1
    is_named: bool = True
    schedule: str = "step"
    dtype: torch.dtype = torch.float32


class ChangeableModel:
    def __init__(self, facts: Facts, seed: int) -> None:
        torch.manual_seed(seed)
        slots = SPARSE[facts.rule].optimizer_slots()
        self.tables = {
            name: asyncckpt.HashTable(name, dim, optimizer_slots=slots) for name, dim in facts.tables.items()
        }
        self.bags = nn.ModuleDict({name: HashEmbeddingBag(table) for name, table in self.tables.items()})
        self.net = nn.ModuleDict({name: nn.Linear(4, width) for name, width in facts.layers.items()}).to(facts.dtype)
        named = [pair for layer in facts.order for pair in self.net[layer].named_parameters(layer)]
        given = named if facts.is_named else [parameter for _, parameter in named]
        cuts = [0, len(given) // 2, len(given)] if facts.groups == 2 else [0, len(given)]
        pairs = pairwise(cuts)
        self.dense = DENSE[facts.dense]([{"params": given[begin:end]} for begin, end in pairs])
        self.sparse = SPARSE[facts.rule](self.bags, lr=0.1)
        self.schedule = SCHEDULES[facts.schedule](self.dense)

    def state(self) -> dict[str, Any]:
        return {"net": self.net, "dense": self.dense, "sparse": self.sparse, "schedule": self.schedule}

    def train(self, step: int) -> None:
        for table in self.bags.values():
            table(torch.arange(6).view(3, 2) + step).square().sum().backward()
        for number, parameter in enumerate(self.net.parameters()):
            parameter.grad = torch.full_like(parameter, 0.01 * (number + step))
        for optimizer in (self.dense, self.sparse):
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(self.schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.schedule.step(1.0)
        else:
            self.schedule.step()

    def facts(self) -> list[Any]:
        """Everything that was trained, with the moments by the names of their parameters."""
        names = {id(parameter): name for name, parameter in self.net.named_parameters()}
        moments = {names[id(parameter)]: entries for parameter, entries in self.dense.state.items()}
        rows = [(name, table.ids(), table.read(table.ids())) for name, table in sorted(self.tables.items())]
        return [
            plain(dict(self.net.state_dict())),
            plain(moments),
            plain(self.sparse.state_dict()["state"]),
            plain(rows),
        ]


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return sorted((str(key), plain(item)) for key, item in value.items())
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


# Each returns other facts, or the same ones.
Change = Callable[[Facts, random.Random], Facts]


def table_added(facts: Facts, _: random.Random) -> Facts:
    return replace(facts, tables={**facts.tables, "ad": 4})


def table_removed(facts: Facts, _: random.Random) -> Facts:
    return replace(facts, tables=dict(list(facts.tables.items())[:1]))


def table_renamed(facts: Facts, _: random.Random) -> Facts:
    return replace(facts, tables={{"item": "article"}.get(name, name): dim for name, dim in facts.tables.items()})


def other_dim(facts: Facts, drawn: random.Random) -> Facts:
    return replace(facts, tables={name: drawn.choice([4, 8]) for name in facts.tables})


def other_rule(facts: Facts, drawn: random.Random) -> Facts:
    return replace(facts, rule=drawn.choice(list(SPARSE)))


def other_dense(facts: Facts, drawn: random.Random) -> Facts:
    return replace(facts, dense=drawn.choice(list(DENSE)))


def other_groups(facts: Facts, _: random.Random) -> Facts:
    return replace(facts, groups=3 - facts.groups)


def other_order(facts: Facts, drawn: random.Random) -> Facts:
    return replace(facts, order=tuple(drawn.sample(facts.order, len(facts.order))))


def unnamed(facts: Facts, _: random.Random) -> Facts:
    return replace(facts, is_named=False)


def other_schedule(facts: Facts, drawn: random.Random) -> Facts:
    return replace(facts, schedule=drawn.choice(list(SCHEDULES)))


def layer_renamed(facts: Facts, drawn: random.Random) -> Facts:
    was = drawn.choice(facts.order)
    rename = {was: f"{was}_new"}
    layers = {rename.get(name, name): width for name, width in facts.layers.items()}
    return replace(facts, layers=layers, order=tuple(rename.get(name, name) for name in facts.order))


def other_width(facts: Facts, drawn: random.Random) -> Facts:
    return replace(facts, layers={name: drawn.choice([width, 2, 3]) for name, width in facts.layers.items()})


def other_dtype(facts: Facts, drawn: random.Random) -> Facts:
    return replace(facts, dtype=drawn.choice([torch.float32, torch.float64, torch.bfloat16]))


CHANGES: tuple[Change, ...] = (
    table_added, table_removed, table_renamed, other_dim, other_rule, other_dense, other_groups, other_order, unnamed,
    other_schedule, layer_renamed, other_width, other_dtype,
)  # fmt: skip


def drawn_facts(drawn: random.Random) -> Facts:
    """Return those of the model that is saved."""
    was = replace(Facts(), dense=drawn.choice(list(DENSE)), rule=drawn.choice(list(SPARSE)))
    return replace(was, groups=drawn.choice([1, 2]), schedule=drawn.choice(list(SCHEDULES)))
