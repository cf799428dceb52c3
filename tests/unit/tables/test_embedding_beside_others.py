"""Modules, optimizers and reads beside other threads: each changes and sees the rows of its own ids, and no others.

A table is free between two holds of its lock. In turn after each release by a call, another thread runs something to
its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from asyncckpt.errors import UsageError
from asyncckpt.tables import HashEmbedding, HashTable, MultiLevelTable, SparseSGD, Uniform

BATCH = torch.arange(8)
OTHERS = torch.arange(100, 108)
RELEASES_MAX = 20
COLUMNS: dict[str, Any] = {"metadata": {"last_seen": torch.int64, "count": torch.int64}, "capacity": 16}
STEP = 7
UNTOUCHED = {"embedding": [[5.0] * 2] * 8, "last_seen": [0] * 8, "count": [0] * 8}

Trained = HashTable | MultiLevelTable


def hash_table() -> HashTable:
    return HashTable("t", 2, **COLUMNS)


def levels() -> MultiLevelTable:
    return MultiLevelTable("t", 2, cache_rows=8, **COLUMNS)


def admitting() -> MultiLevelTable:
    return MultiLevelTable("t", 2, cache_rows=8, admit_after=2, **COLUMNS)


KINDS = [hash_table, levels, admitting]


class Between:
    """Runs `work` on another thread after a release of the lock of a table by this one, the `number`-th."""

    def __init__(self, table: Trained, patch: pytest.MonkeyPatch, number: int, work: Callable[[], object]) -> None:
        self.number, self.work, self.releases_count = number, work, 0
        self._release, self._owner = table._lock.release, threading.get_ident()
        patch.setattr(table._lock, "release", self.release)

    def release(self) -> None:
        self._release()
        if threading.get_ident() == self._owner:
            self.releases_count += 1
            if self.releases_count == self.number:
                thread = threading.Thread(target=self.work)
                thread.start()
                thread.join()

    @property
    def has_run(self) -> bool:
        return self.releases_count >= self.number


def values_of(table: Trained, ids: torch.Tensor) -> dict[str, list[Any]]:
    """What ids hold, whatever gave them rows; found without `read`, which is looked at here."""
    table.lookup(ids)
    table.lookup(ids)
    with table.rows(ids) as rows:
        return {name: rows[name].tolist() for name in ("embedding", "last_seen", "count")}


def grow(table: Trained) -> None:
    for first in range(1000, 3000, 8):
        table.lookup(torch.arange(first, first + 8))


def take_rows(table: Trained) -> None:
    """Give the rows of the batch to other ids."""
    table.remove(BATCH)
    table.insert(OTHERS, torch.full((8, 2), 5.0))


def evict(table: Trained) -> None:
    table.insert(OTHERS, torch.full((8, 2), 5.0))
    table.lookup(OTHERS)


def at_each_release(
    kind: Callable[[], Trained],
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[Trained], None],
    call: Callable[[Trained], None],
) -> Iterator[Trained]:
    """Run a call with a table of its own for each of its releases of the lock, behind which `work` runs."""
    for number in range(1, RELEASES_MAX):
        table = kind()
        table.insert(BATCH, torch.full((8, 2), 3.0))
        with monkeypatch.context() as patch:
            between = Between(table, patch, number, partial(work, table))
            call(table)
        if not between.has_run:
            assert number > 1
            return
        yield table
    pytest.fail(f"the call releases the lock more than {RELEASES_MAX} times")


def train(table: Trained) -> None:
    """Two forwards, of the values of `at_each_release`, and a step."""
    module = HashEmbedding(table)
    module.step = STEP
    optimizer = SparseSGD(module, lr=1.0)
    for _ in range(2):
        module(BATCH).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("work", [grow, evict])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_changes_the_rows_of_its_batch(
    kind: Callable[[], Trained], work: Callable[[Trained], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for table in at_each_release(kind, monkeypatch, work, train):
        assert values_of(table, BATCH) == {"embedding": [[1.0] * 2] * 8, "last_seen": [STEP] * 8, "count": [2] * 8}
        assert work is grow or values_of(table, OTHERS) == UNTOUCHED


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_changes_no_rows_that_other_ids_got_meanwhile(
    kind: Callable[[], Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    for table in at_each_release(kind, monkeypatch, take_rows, train):
        assert values_of(table, OTHERS) == UNTOUCHED


@pytest.mark.parametrize("work", [grow, evict, take_rows])
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_sees_the_rows_of_its_batch(
    kind: Callable[[], Trained], work: Callable[[Trained], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(table: Trained) -> None:
        assert HashEmbedding(table).eval()(BATCH).tolist() == [[3.0] * 2] * 8

    def train_once(table: Trained) -> None:
        # An id that was removed meanwhile begins anew.
        assert set(HashEmbedding(table)(BATCH).flatten().tolist()) <= {3.0, 0.0 if work is take_rows else 3.0}

    for call in (evaluate, train_once):
        assert list(at_each_release(kind, monkeypatch, work, call))


def state_of(table: Trained) -> list[Any]:
    """Everything that decides what a table does next."""
    state: list[Any] = [table.ids().tolist(), table._store.marks._marks.tolist()]
    if isinstance(table, MultiLevelTable):
        use = table._cache.use
        state += [table.statistics(), table._cache.host_rows.tolist(), use.tick, use.ticks.tolist(), use.hits.tolist()]
        state += [use.awaited_until.tolist(), table.companions() and len(table._candidates or ())]
    return state


@pytest.mark.parametrize("kind", KINDS)
def test_reads_leave_everything_alone(kind: Callable[[], Trained]) -> None:
    table = kind()
    for first in range(0, 40, 4):
        table.insert(torch.arange(first, first + 4), torch.arange(first, first + 4.0).view(4, 1).expand(4, 2))
        table.lookup(torch.arange(first, first + 4))
    before = state_of(table)
    some = torch.tensor([[39, 3, 3], [-5, 12, 1 << 40]])
    expected = [[39.0, 3.0, 3.0], [0.0, 12.0, 0.0]]
    assert HashEmbedding(table).eval()(some)[..., 0].tolist() == expected
    read = table.read(some, absent_as_zeros=True)
    assert read["embedding"][..., 0].tolist() == expected
    assert {name: tuple(values.shape) for name, values in read.items()} == {
        "embedding": (2, 3, 2),
        "last_seen": (2, 3),
        "count": (2, 3),
    }
    assert list(table.read(some, only="count", absent_as_zeros=True)) == ["count"]
    assert state_of(table) == before


def test_a_reader_of_unknown_ids_says_what_they_are() -> None:
    table = HashTable("t", 2, initializer=Uniform(1.0, seed=1))
    rows = table.lookup(BATCH)
    assert torch.equal(table.read(BATCH)["embedding"], table.embedding[rows])
    with pytest.raises(UsageError, match="id to read from table 't' has no row, found 100"):
        table.read(torch.cat([BATCH, OTHERS]))
    with pytest.raises(UsageError, match="no column"):
        table.read(BATCH, only="sum")
    with pytest.raises(UsageError, match="absent_as_zeros"):
        table.read(BATCH, absent_as_zeros=1)  # type: ignore[arg-type]
