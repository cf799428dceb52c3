"""Ids as arguments, and ownership: the unsigned bit pattern modulo the shard count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.errors import UsageError
from asyncckpt.tables import HashTable

INT64 = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([1], dtype=torch.int32), r"found torch.int32, expected torch.int64 \(use ids.long\(\)\)"),
        (torch.tensor([1.0]), "found torch.float32, expected torch.int64 .*lost bits"),
        (torch.tensor([True]), "found torch.bool"),
        (torch.tensor([1], dtype=torch.uint64), r"use ids.view\(torch.int64\)"),
        (np.array([1], dtype=np.int32), r"found dtype\('int32'\), .*use ids.astype\(np.int64\)"),
        (np.array([1.0]), "lost bits"),
        (np.array([1], dtype=np.uint64), r"use ids.view\(np.int64\)"),
        (np.array([1], dtype=">i8"), "wrong dtype"),
        ([1, 2], "ids for table 'user' must be .*; got a list"),
        (1, "ids for table 'user' must be .*; got an int"),
    ],
)
@pytest.mark.parametrize("use", ["lookup", "remove", "owns"])
def test_only_int64_ids_are_taken(use: str, ids: Any, message: str) -> None:
    table = HashTable("user", 2)
    with pytest.raises(UsageError, match=message):
        getattr(table, use)(ids)
    assert len(table) == 0


@given(ids=st.lists(INT64, max_size=30), count=st.integers(1, 9))
def test_every_id_has_one_owner(ids: list[int], count: int) -> None:
    batch = torch.tensor(ids, dtype=torch.int64)
    for index in range(count):
        mask = HashTable("user", 1, shard=(index, count), capacity=1).owns(batch)
        assert mask.dtype is torch.bool
        assert mask.tolist() == [id % 2**64 % count == index for id in ids]


def test_owns_keeps_the_shape() -> None:
    table = HashTable("user", 1, shard=(0, 2))
    assert table.owns(torch.arange(6).reshape(2, 3)).tolist() == [[True, False, True], [False, True, False]]
    assert table.owns(np.array(3)).shape == ()


@pytest.mark.parametrize("count", [3, 4])
def test_foreign_id_is_refused_as_a_whole(count: int) -> None:
    table = HashTable("user", 2, shard=(1, count))
    owned = torch.tensor([1, 1 + count])
    foreign = -1 if count == 3 else -2
    owner = foreign % 2**64 % count
    what = f"id {foreign} belongs to shard {owner} of {count}, and table 'user' holds shard 1 of {count}"
    mixed = torch.cat([owned, torch.tensor([foreign, 0])])
    with pytest.raises(UsageError, match=what):
        table.lookup(mixed)
    with pytest.raises(UsageError, match=what):
        table.insert(mixed, torch.ones(4, 2))
    assert len(table) == 0
    assert table.lookup(mixed, insert=False).tolist() == [-1] * 4
    assert table.lookup(owned).tolist() == [0, 1]
    load = table.begin_load(clear=False, rows_count=0)
    with pytest.raises(UsageError, match=what):
        load.insert(mixed)
    load.end(ok=True)
    assert len(table) == 2


def test_id_of_another_slice_is_refused() -> None:
    table = HashTable("user", 2, shard=(4, 8, 65_536))
    table.lookup(torch.tensor([4, 7, 65_540, -65_530]))
    for foreign, bucket in ((3, 3), (8, 8), (65_539, 3), (-1, 65_535)):
        what = f"id {foreign} belongs to bucket {bucket} of 65536, and table 'user' holds buckets 4 to 8 of 65536"
        with pytest.raises(UsageError, match=what):
            table.lookup(torch.tensor([5, foreign]))
    assert sorted(table.ids().tolist()) == [-65_530, 4, 7, 65_540]
