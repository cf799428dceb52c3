"""A cut of several tables of which some raise: none of the others stays held."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from asyncckpt.engine.save.state_cut import Cut
from asyncckpt.errors import IOFailedError
from asyncckpt.model.table import Column, Role, TableSchema

NAMES = ("a", "b", "c")


class Table:
    """A table, its cut, and what was done to it."""

    def __init__(self, name: str, log: list[str], failing: str) -> None:
        self.name = name
        self.log = log
        self.failing = failing

    def schema(self) -> TableSchema:
        return TableSchema((Column("id", "int64", (), Role.ID),))

    def begin_cut(self) -> Any:
        self._do("begin")
        return self

    def fence(self) -> None:
        self._do("fence")

    def end(self, ok: bool) -> None:
        self._do("end")

    def _do(self, what: str) -> None:
        self.log.append(f"{what} {self.name}")
        if f"{what} {self.name}" == self.failing:
            raise IOFailedError(f"{what} {self.name} failed")


def cut_of(log: list[str], failing: str) -> Cut:
    tables: Any = {name: Table(name, log, failing) for name in NAMES}
    return Cut.begin({}, tables)


EVERY_FENCE, EVERY_END = [f"fence {name}" for name in NAMES], [f"end {name}" for name in NAMES]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("call", [Cut.fence, lambda cut: cut.end(ok=True)])
def test_one_that_fails_to_fence_leaves_no_other_unfenced(name: str, call: Callable[[Cut], None]) -> None:
    log: list[str] = []
    cut = cut_of(log, f"fence {name}")
    with pytest.raises(IOFailedError, match=f"fence {name} failed"):
        call(cut)
    cut.end(ok=False)
    assert log[len(NAMES) :] == EVERY_FENCE + EVERY_END


@pytest.mark.parametrize("name", NAMES)
def test_one_that_fails_to_end_leaves_no_other_without_an_end(name: str) -> None:
    log: list[str] = []
    cut = cut_of(log, f"end {name}")
    cut.fence()
    with pytest.raises(IOFailedError, match=f"end {name} failed"):
        cut.end(ok=True)
    cut.end(ok=True)
    assert log[len(NAMES) :] == EVERY_FENCE + EVERY_END


@pytest.mark.parametrize("name", NAMES)
def test_one_that_fails_to_begin_gives_up_those_before(name: str) -> None:
    log: list[str] = []
    with pytest.raises(IOFailedError, match=f"begin {name} failed"):
        cut_of(log, f"begin {name}")
    before = [line.removeprefix("begin ") for line in log[: log.index(f"begin {name}")]]
    expected = [f"{what} {other}" for what in ("fence", "end") for other in before]
    assert log[len(before) + 1 :] == expected


def test_tables_begin_in_one_order_whatever_that_of_their_names() -> None:
    """Else two cuts at once, or a cut and a load, wait for each other."""
    log: list[str] = []
    tables: Any = {name: Table(name, log, "") for name in NAMES}
    for names in itertools.permutations(NAMES):
        cut = Cut.begin({}, {name: tables[name] for name in names})
        assert [item.name for item in cut.tables] == list(names)
    assert log == log[: len(NAMES)] * 6
