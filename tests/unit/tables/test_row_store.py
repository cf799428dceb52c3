"""What a replicated table says of its ids: the count and the sum of fingerprints of just those that it holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncckpt
from asyncckpt.model.table import CountsIds, IdsHeld
from asyncckpt.tables import HashTable, MultiLevelTable
from asyncckpt.tables.table_arguments import ids_held

IDS = st.lists(st.integers(-20, 20), max_size=12)
PROGRAMS = st.lists(st.tuples(st.sampled_from(["insert", "lookup", "find", "remove", "clear"]), IDS), max_size=12)


def hash_table(**options: Any) -> HashTable:
    return HashTable("t", 2, capacity=2, **{"replicated": True, **options})


def levels(**options: Any) -> MultiLevelTable:
    return MultiLevelTable("t", 2, cache_rows=4, capacity=2, replicated=True, **options)


MAKERS = pytest.mark.parametrize("make", [hash_table, levels])


def expected(ids: set[int]) -> IdsHeld:
    return ids_held(np.array(sorted(ids), dtype=np.int64))


@MAKERS
@pytest.mark.filterwarnings("ignore:cache of table:RuntimeWarning")
@settings(deadline=None)
@given(program=PROGRAMS)
def test_all_that_changes_ids_is_counted(make: Callable[[], Any], program: list[tuple[str, list[int]]]) -> None:
    table, held = make(), set[int]()
    assert isinstance(table, CountsIds)
    for word, numbers in program:
        ids = torch.tensor(numbers, dtype=torch.int64)
        if word == "insert":
            table.insert(ids, torch.zeros(len(ids), 2))
        elif word in ("lookup", "find"):
            table.lookup(ids, insert=word == "lookup")
        else:
            table.remove(ids) if word == "remove" else table.clear()
        held = {"insert": held | {*numbers}, "lookup": held | {*numbers}, "find": held}.get(word, held - {*numbers})
        held = set() if word == "clear" else held
        assert table.ids_held() == expected(held)


@MAKERS
def test_a_load_is_counted(make: Callable[[], Any], tmp_path: Path) -> None:
    table = make()
    table.insert(torch.arange(9), torch.zeros(9, 2))
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}) as saver:
        saver.save(1)
    other = make()
    other.insert(torch.arange(7, 12), torch.zeros(5, 2))
    asyncckpt.Loader(tmp_path, {"t": other}, merge=True).load()
    assert other.ids_held() == expected({*range(12)})
    asyncckpt.Loader(tmp_path, {"t": other}).load()
    assert other.ids_held() == table.ids_held() == expected({*range(9)})


def test_an_insert_that_fails_is_not_counted() -> None:
    def fail(ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no rows")

    table = hash_table(initializer=fail)
    with pytest.raises(RuntimeError, match="no rows"):
        table.lookup(torch.arange(3))
    assert table.ids_held() == IdsHeld()


def test_candidates_are_counted() -> None:
    table = levels(admit_after=2)
    candidates: Any = table.companions()["candidates"]
    table.lookup(torch.tensor([1, 2, 3]))
    table.lookup(torch.tensor([3]))
    assert candidates.replicated
    assert (candidates.ids_held(), table.ids_held()) == (expected({1, 2}), expected({3}))


def test_the_sum_does_not_depend_on_order_and_differs_for_others() -> None:
    ids = np.random.default_rng(1).permutation(5000).astype(np.int64)
    assert ids_held(ids) == ids_held(np.sort(ids))
    assert ids_held(ids) != ids_held(ids + 1)
    assert ids_held(ids[:0]) == IdsHeld()


def test_who_has_a_shard_pays_nothing() -> None:
    table = hash_table(shard=(0, 2), replicated=False)
    table.lookup(torch.tensor([2, 4]))
    assert table.ids_held() == IdsHeld(2, 0)
