"""Eviction by a metadata column: exact comparison, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from asyncckpt.errors import UsageError
from asyncckpt.tables import HashEmbedding, HashTable, MultiLevelTable
from asyncckpt.tables.stored_table import is_below, is_older

METADATA: dict[str, Any] = {"last_seen": torch.int64, "score": torch.float16, "pair": (torch.int64, (2,))}


def tables() -> list[Any]:
    return [
        HashTable("t", 2, optimizer_slots={"sum": ()}, metadata=METADATA),
        MultiLevelTable("t", 2, cache_rows=2, optimizer_slots={"sum": ()}, metadata=METADATA),
    ]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("below", [3, 2.5, 3.0, -1, 0, math.inf, -math.inf, 10**400, -(10**400)])
def test_numbers_below_a_bound(dtype: torch.dtype, below: float) -> None:
    values = [0, 1, 2, 3, 4]
    assert is_below(torch.tensor(values, dtype=dtype), below).tolist() == [value < below for value in values]


def test_large_integers_are_compared_exactly() -> None:
    values = torch.tensor([2**53, 2**53 + 1, 2**62, -(2**63), 2**63 - 1])
    assert is_below(values, 2**53 + 1).tolist() == [True, False, False, True, False]
    assert is_below(values, 2.0**63).tolist() == [True] * 5
    assert is_below(values, -(2.0**63)).tolist() == [False] * 5
    assert is_below(torch.tensor([True, False]), 1).tolist() == [False, True]


@pytest.mark.parametrize("table", tables(), ids=["HashTable", "MultiLevelTable"])
def test_evict_forgets_old_ids(table: Any) -> None:
    table.insert(torch.arange(6), torch.ones(6, 2), last_seen=torch.tensor([5, 1, 9, 2, 7, 1]))
    assert table.evict("last_seen", below=5) == 3
    assert sorted(table.ids().tolist()) == [0, 2, 4]
    assert table.evict("last_seen", below=5) == 0
    assert table.evict("last_seen", below=math.inf) == 3
    assert len(table) == 0


@pytest.mark.parametrize("table", tables(), ids=["HashTable", "MultiLevelTable"])
@pytest.mark.parametrize("column", ["sum", "embedding", "id", "pair", "age", 3])
def test_evict_needs_a_metadata_column_of_one_number(table: Any, column: Any) -> None:
    message = r"column for an eviction from table 't' must be .*one of \['last_seen', 'score'\]; got"
    with pytest.raises(UsageError, match=message):
        table.evict(column, below=3)


@pytest.mark.parametrize("table", tables(), ids=["HashTable", "MultiLevelTable"])
@pytest.mark.parametrize("below", [True, "3", None, math.nan])
def test_evict_needs_a_number(table: Any, below: Any) -> None:
    with pytest.raises(UsageError, match=r"an eviction from table 't' (needs either below|must be a number)"):
        table.evict("last_seen", below=below)


@pytest.mark.parametrize("kind", [HashTable, MultiLevelTable])
def test_modules_count_mentions_in_training(kind: Any) -> None:
    options = {"cache_rows": 2} if kind is MultiLevelTable else {}
    table = kind("t", 2, metadata={"count": torch.int64, "last_seen": torch.int64}, **options)
    module = HashEmbedding(table)
    module(torch.tensor([4, 5, 4, 4]))
    module(torch.tensor([[5], [6]]))
    module.eval()(torch.tensor([6, 6]))
    assert table.evict("count", below=2) == 1
    assert sorted(table.ids().tolist()) == [4, 5]
    rows = table.lookup(torch.tensor([4, 5]), insert=False)
    assert table.slot("count")[rows].tolist() == [3, 2]


def test_a_column_named_count_of_another_kind_is_left_alone() -> None:
    table = HashTable("t", 2, metadata={"count": torch.float32})
    HashEmbedding(table)(torch.tensor([1, 1]))
    assert table.slot("count")[table.lookup(torch.tensor([1]))].tolist() == [0.0]


@pytest.mark.parametrize("table", tables(), ids=["HashTable", "MultiLevelTable"])
def test_age_is_counted_from_the_newest_stamp(table: Any) -> None:
    table.insert(torch.arange(5), torch.ones(5, 2), last_seen=torch.tensor([2**60, 2**60 - 10, 2**60 - 11, 1, 0]))
    assert table.evict("last_seen", older_than=2**61) == 0
    assert table.evict("last_seen", older_than=10) == 2
    # Id 4 was never stamped.
    assert sorted(table.ids().tolist()) == [0, 1, 4]
    table.lookup(torch.tensor([0, 1]))
    assert table.evict("last_seen", older_than=0) == 1
    assert sorted(table.ids().tolist()) == [0, 4]


@pytest.mark.parametrize("table", tables(), ids=["HashTable", "MultiLevelTable"])
def test_a_step_that_nobody_set_removes_nothing(table: Any) -> None:
    module = HashEmbedding(table)
    module(torch.arange(4))
    assert table.evict("last_seen", older_than=0) == 0
    message = "eviction from table 't' would remove all ids, by a column nobody has written, found .*'last_seen' is 0"
    with pytest.raises(UsageError, match=message):
        table.evict("last_seen", below=1000)
    assert len(table) == 4
    # A run that goes on and forgets the step neither ages the rows that it uses, nor the others.
    module.step = 500
    module(torch.arange(2))
    module.step = None
    module(torch.arange(1))
    assert table.evict("last_seen", older_than=100) == 0
    assert table.evict("last_seen", below=100) == 2


def test_numbers_that_are_not_finite_have_no_age() -> None:
    values = torch.tensor([math.inf, -math.inf, math.nan, 5.0, 1.0, 0.0])
    assert is_older(values, 2, fill=0.0).tolist() == [False] * 4 + [True, False]
    assert is_older(values[:3], 2, fill=0.0).tolist() == [False] * 3


@pytest.mark.parametrize("bounds", [{}, {"below": 1, "older_than": 1}, {"older_than": -1}, {"older_than": math.nan}])
def test_an_eviction_has_one_bound(bounds: Any) -> None:
    with pytest.raises(UsageError, match=r"an eviction from table 't' (needs either|must be a number)"):
        tables()[0].evict("last_seen", **bounds)


@pytest.mark.parametrize("age", [0, 0.0, 0.5, 1.0, 1.5, 2, 2.5, 2.0**70, 10**400, math.inf])
@pytest.mark.parametrize("newest", [2**53 + 1, 2**60 + 3, 2**63 - 1, 3])
def test_ages_of_large_stamps_are_exact(newest: int, age: float) -> None:
    stamps = [newest, newest - 1, newest - 2, newest - 3]
    expected = [stamp != 0 and newest - stamp > age for stamp in stamps]
    assert is_older(torch.tensor(stamps), age, fill=0).tolist() == expected


@pytest.mark.parametrize("age", [0, 1.5, 10**400, math.inf])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float16, torch.float64])
def test_ages_of_any_dtype(dtype: torch.dtype, age: float) -> None:
    stamps = torch.tensor([5, 4, 3, 0], dtype=dtype)
    assert is_older(stamps, age, fill=0).tolist() == [False, age < 1, age < 2, False]
