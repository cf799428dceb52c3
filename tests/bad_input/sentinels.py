"""Targets that tell whether a load has touched them, and loads that must be refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from crafted import Crafted, picture

import asyncckpt

STEP = 7
IDS = [3, -5, 2**40]
UNTOUCHED_ID = 999


def new_table() -> asyncckpt.HashTable:
    return asyncckpt.HashTable("user", 2, optimizer_slots={"sum": ()}, metadata={"seen": torch.int64}, capacity=8)


def small_tensors() -> dict[str, torch.Tensor]:
    return {
        "w": torch.arange(12, dtype=torch.float32).view(3, 4) + 0.5,
        "b": torch.tensor([1, -(2**62), 3, 4, 5]),
        "flag": torch.tensor([True, False, True]),
    }


def small_table() -> asyncckpt.HashTable:
    table = new_table()
    rows = torch.arange(6, dtype=torch.float32).view(3, 2)
    table.insert(torch.tensor(IDS), rows, sum=torch.tensor([0.25, 0.5, 0.75]), seen=torch.tensor([7, 8, 9]))
    return table


def save_one(path: Any, step: int = 0, **options: Any) -> None:
    with asyncckpt.Saver(path=path, tensors={"w": torch.ones(3)}, **options) as saver:
        saver.save(step)


def save_small(root: Path, *, step: int = STEP) -> Crafted:
    """Three tensors, two values, metadata and a table of three ids, in one shard file."""
    state = {**small_tensors(), "epoch": 3, "lr": 0.1}
    with asyncckpt.Saver(path=root, hashtables={"user": small_table()}, tensors=state) as saver:
        saver.save(step, metadata={"note": "sound"})
    return Crafted(root=root, step=step)


@dataclass
class Targets:
    """Targets of the small checkpoint, filled with what no checkpoint holds."""

    tensors: dict[str, Any] = field(
        default_factory=lambda: {
            "w": torch.full((3, 4), -77.0),
            "b": torch.full((5,), -77),
            "flag": torch.tensor([False, True, False]),
            "epoch": -77,
            "lr": -77.0,
        }
    )
    table: asyncckpt.HashTable = field(default_factory=new_table)

    def __post_init__(self) -> None:
        self.table.insert(torch.tensor([UNTOUCHED_ID]), torch.full((1, 2), -77.0))

    @property
    def untouched(self) -> bool:
        same = [
            self.tensors["w"].eq(-77).all(),
            self.tensors["b"].eq(-77).all(),
            self.tensors["flag"].eq(torch.tensor([False, True, False])).all(),
            self.table.ids().tolist() == [UNTOUCHED_ID],
        ]
        return all(map(bool, same)) and self.rows_of_table() == {UNTOUCHED_ID: [-77.0, -77.0]}

    @property
    def loaded(self) -> bool:
        """Whether every value is the small checkpoint's."""
        wanted = small_tensors()
        dense = all(torch.equal(self.tensors[name], value) for name, value in wanted.items())
        return dense and self.rows_of_table() == Targets(table=small_table()).rows_of_table(leave_out=UNTOUCHED_ID)

    def rows_of_table(self, *, leave_out: int | None = None) -> dict[int, list[float]]:
        rows = self.table.embedding[self.table.used_rows()].tolist()
        return {id: row for id, row in zip(self.table.ids().tolist(), rows, strict=True) if id != leave_out}

    def load(self, root: Path | str, **options: Any) -> asyncckpt.LoadReport:
        """Load all of it."""
        return asyncckpt.Loader(root, {"user": self.table}, self.tensors, **options).load()


class HookedTable(asyncckpt.HashTable):
    """A table that does something when the load begins to fill it: files are open and checked, no data is read yet."""

    hook: Callable[[], object]

    def begin_load(self, **options: Any) -> Any:
        self.hook()
        return super().begin_load(**options)


def hooked_targets(hook: Callable[[], object]) -> Targets:
    made = new_table()
    made.__class__ = HookedTable
    assert isinstance(made, HookedTable)
    made.hook = hook
    return Targets(table=made)


def refused(
    found: Crafted | Path,
    error_class: type[asyncckpt.CheckpointError],
    *parts: str,
    untouched: bool = True,
    **options: Any,
) -> asyncckpt.CheckpointError:
    """Load what must be refused: with exactly this class, a message that holds all parts, and nothing changed on disk.

    With `untouched` no target may have been touched either; without, the table must be empty.
    """
    root = found.root if isinstance(found, Crafted) else found
    before = picture(root)
    targets = Targets()
    with pytest.raises(asyncckpt.CheckpointError) as caught:
        targets.load(root, **options)
    message = str(caught.value)
    assert type(caught.value) is error_class, message
    assert [part for part in parts if part not in message] == [], message
    assert not message.endswith("."), message
    if untouched:
        assert targets.untouched, message
    else:
        assert len(targets.table) == 0, "a failed load left rows in a table"
    assert picture(root) == before, "the loader wrote"
    return caught.value
