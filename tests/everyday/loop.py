"""A training loop of a recommender: modules, optimizers, tables, plain values, and all that people change of them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import asyncckpt
from asyncckpt.trainer_state import RngState
from tests.end_to_end.trees import differences, live

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64)
OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    lambda parameters: torch.optim.AdamW(parameters, foreach=True, amsgrad=True),
    lambda parameters: torch.optim.AdamW(parameters, fused=True),
    lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    lambda parameters: torch.optim.Adagrad(parameters),
    lambda parameters: torch.optim.RMSprop(parameters, lr=0.001),
)
Rows = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Image:
    """A copy of all that a save of this moment holds."""

    dense: dict[str, Any]
    tables: dict[str, Rows]

    def differs(self, dense: Any, tables: dict[str, Rows]) -> list[str]:
        found = list(differences(dense, self.dense))
        return found + list(differences({name: tables.get(name) for name in self.tables}, self.tables, "tables"))


class GrowingNet(nn.Module):
    """Has tied weights, a buffer that is not saved, a parameter that is not trained, and some that come later."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, width)
        self.third.weight = self.second.weight
        self.norm, self.last = nn.BatchNorm1d(width), nn.Linear(width, 1)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.frozen = nn.Parameter(torch.randn(4, 5), requires_grad=False)
        self.more = nn.ParameterDict()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = self.last(self.norm(self.third(self.second(torch.relu(self.first(rows))))))
        return found + sum(value.float().sum() for value in self.more.values())


class Loop:
    """One program's training. state: what a Saver gets as `tensors`."""

    def __init__(self, draw: random.Random, seed: int) -> None:
        self.draw, self.step = draw, 0
        torch.manual_seed(seed)
        self.net = GrowingNet(draw.choice([8, 96]))
        self.optimizer = draw.choice(OPTIMIZERS)([one for one in self.net.parameters() if one.requires_grad])
        self.kinds = {f"t{number}": self._kind() for number in range(draw.randrange(3))}
        self.tables = self.new_tables()
        self.embeddings = {name: asyncckpt.nn.HashEmbedding(table) for name, table in self.tables.items()}
        self.sparse = asyncckpt.optim.SparseAdagrad(list(self.embeddings.values())) if self.tables else None
        base = torch.randn(30, 10)
        self.state: dict[str, Any] = {
            "net": self.net,
            "optimizer": self.optimizer,
            "schedule": torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99),
            "random": RngState(generators={"mine": torch.Generator().manual_seed(seed)}),
            "views": {"base": base, "row": base[3], "column": base[:, 2], "turned": base.t(), "same": base},
            "plain": {"step": 0},
        }
        if self.sparse is not None:
            self.state["sparse"] = self.sparse

    def _kind(self) -> dict[str, Any]:
        return {
            "dim": self.draw.choice([1, 4]),
            "dtype": self.draw.choice([torch.float32, torch.bfloat16]),
            "optimizer_slots": {"sum": torch.float32},
            "metadata": {"last_seen": torch.int64},
            "initializer": asyncckpt.nn.Uniform(0.1, seed=self.draw.randrange(99)),
            "admit_after": self.draw.choice([None, None, 2]),
            "cache_rows": self.draw.choice([None, 40, 100]),
        }

    def new_tables(self, *, shard: tuple[int, int] = (0, 1)) -> dict[str, Any]:
        """Make empty tables like these. Those of a shard have no cache."""
        found: dict[str, Any] = {}
        for name, kind in self.kinds.items():
            given = {key: value for key, value in kind.items() if value is not None}
            if shard != (0, 1):
                given.pop("cache_rows", None)
            new: Any = asyncckpt.MultiLevelTable if "cache_rows" in given else asyncckpt.HashTable
            found[name] = new(name, shard=shard, **given)
        return found

    def optimizers(self) -> list[Any]:
        return [self.optimizer] if self.sparse is None else [self.optimizer, self.sparse]

    def image(self) -> Image:
        return Image(copy.deepcopy(live(self.state)), {name: rows_of(table) for name, table in self.tables.items()})

    # -- training

    def train(self) -> None:
        self.forward_and_backward()
        self.end_step()

    def forward_and_backward(self) -> None:
        loss = self.net(torch.randn(5, 6)).square().mean()
        for embedding in self.embeddings.values():
            embedding.step = self.step + 1
            ids = torch.randint(0, self.draw.choice([50, 3000]), (self.draw.choice([1, 30]),))
            loss = loss + embedding(ids * self.draw.choice([1, -7, 2**40])).float().square().sum()
        loss.backward()

    def end_step(self) -> None:
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        self.state["schedule"].step()
        self.step += 1
        self.state["plain"]["step"] = self.step

    def change(self, *, behind_a_save: bool = False) -> str:
        """Change something outside of a step. behind_a_save: only what `optimizers=` lets change before the next."""
        changes = [*ANY_TIME, *(() if behind_a_save else BETWEEN_STEPS)]
        change = self.draw.choice(changes)
        change(self)
        return change.__name__

    def table(self) -> Any:
        return self.draw.choice(list(self.tables.values())) if self.tables else None

    def some_ids(self, table: Any) -> torch.Tensor:
        ids = table.ids()
        found: torch.Tensor = ids[torch.randperm(len(ids))[: self.draw.randrange(1, 9)]]
        return found


def rows_of(table: Any) -> Rows:
    """Return all columns of a table, by id."""
    ids = table.ids()
    return in_order({"id": ids, **table.read(ids)})


def in_order(columns: Rows) -> Rows:
    order = torch.argsort(columns["id"])
    return {name: column[order] for name, column in sorted(columns.items())}


def new_tensor(draw: random.Random) -> torch.Tensor:
    shape = draw.choice([(), (0,), (3, 0, 2), (5,), (3, 4), (draw.randrange(1, 9000),), (60, 40)])
    found = torch.randint(0, 2, shape) if draw.random() < 0.2 else 50 * torch.randn(shape)
    found = found.to(draw.choice(DTYPES))
    return found[::2].t() if found.dim() == 2 and draw.random() < 0.5 else found


def new_value(draw: random.Random, depth: int = 0) -> Any:
    plain = [None, True, 0, -(2**70), -0.0, float("nan"), 1j, "", "a.b/\u20ac", b"\0", torch.float32, np.float32(1.5)]
    kind = draw.randrange(7 if depth < 3 else 4)
    if kind < 2:
        return draw.choice(plain)
    if kind == 2:
        return {2.5}
    if kind == 3:
        return new_tensor(draw) if draw.random() < 0.7 else np.array([[1.5, 2]])
    items = [new_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 4:
        return items
    if kind == 5:
        return tuple(items)
    named = zip(draw.sample(["a", "a.b", "", 1, True, None, 2.5, "1"], len(items)), items, strict=True)
    return dict(named)


# -- what may change at any time ---------------------------------------------------------------------------------------


def set_a_value(loop: Loop) -> None:
    loop.state["plain"][loop.draw.choice("abcdef")] = new_value(loop.draw)


def forget_values(loop: Loop) -> None:
    loop.state["plain"] = {"step": loop.step}


def write_to_views(loop: Loop) -> None:
    loop.state["views"]["same"].add_(1.0)


def replace_a_view(loop: Loop) -> None:
    loop.state["views"][loop.draw.choice(["base", "row", "new"])] = new_tensor(loop.draw)


def write_to_a_buffer(loop: Loop) -> None:
    loop.net.seen.fill_(loop.draw.random())


def replace_a_buffer(loop: Loop) -> None:
    loop.net.seen = torch.randn(loop.draw.choice([3, 3, 7]))


def remove_rows(loop: Loop) -> None:
    if (table := loop.table()) is not None:
        table.remove(loop.some_ids(table))


def expire_rows(loop: Loop) -> None:
    if (table := loop.table()) is not None:
        table.evict("last_seen", older_than=max(0, loop.step - 2))


def write_rows(loop: Loop) -> None:
    if (table := loop.table()) is not None:
        with table.rows(loop.some_ids(table)) as held:
            held.embedding += 1


def insert_rows(loop: Loop) -> None:
    if (table := loop.table()) is not None:
        ids = torch.randperm(5000)[: loop.draw.randrange(1, 60)]
        table.insert(ids, torch.randn(len(ids), table.dim).to(table.dtype))


def look_rows_up(loop: Loop) -> None:
    if (table := loop.table()) is not None:
        table.lookup(torch.randint(0, 9999, (30,)))


def clear_a_table(loop: Loop) -> None:
    if loop.draw.random() < 0.2 and (table := loop.table()) is not None:
        table.clear()


# -- and what may not while a save with `optimizers=` copies behind the call ------------------------------------------


def add_a_parameter(loop: Loop) -> None:
    parameter = nn.Parameter(torch.randn(loop.draw.choice([(), (3,), (0,), (90, 90)])))
    loop.net.more[f"p{len(loop.net.more)}-{loop.step}"] = parameter


def forget_a_parameter(loop: Loop) -> None:
    for name in list(loop.net.more)[:1]:
        del loop.net.more[name]


def give_a_parameter_other_memory(loop: Loop) -> None:
    frozen = loop.net.frozen
    frozen.data = frozen.data.to(loop.draw.choice([torch.float32, torch.bfloat16])).clone()


def scale_a_parameter(loop: Loop) -> None:
    with torch.no_grad():
        loop.net.first.weight.mul_(0.9)


def load_the_optimizer(loop: Loop) -> None:
    loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))


def load_the_module(loop: Loop) -> None:
    loop.net.load_state_dict(copy.deepcopy(loop.net.state_dict()))


def set_the_learning_rate(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] = loop.draw.random() / 100


def write_rows_by_torch(loop: Loop) -> None:
    table = loop.table()
    if isinstance(table, asyncckpt.HashTable) and len(table):
        with torch.no_grad():
            table.embedding[table.lookup(loop.some_ids(table), insert=False)] += 1.0


def shrink_a_table(loop: Loop) -> None:
    if (table := loop.table()) is not None:
        table.shrink()


ANY_TIME: tuple[Callable[[Loop], None], ...] = (
    *(set_a_value, forget_values, write_to_views, replace_a_view, write_to_a_buffer, replace_a_buffer),
    *(remove_rows, expire_rows, write_rows, insert_rows, look_rows_up, clear_a_table),
)
BETWEEN_STEPS: tuple[Callable[[Loop], None], ...] = (
    *(add_a_parameter, forget_a_parameter, give_a_parameter_other_memory, scale_a_parameter, load_the_optimizer),
    *(load_the_module, set_the_learning_rate, write_rows_by_torch, shrink_a_table),
)
