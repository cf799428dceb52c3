"""What tables say of the rows that a rank holds, and whether what all ranks say fits together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.adapters import FixedTable
from asyncckpt.engine.ranks.holdings import (
    TableSlice,
    check_ids_held,
    check_said,
    check_slices,
    decode_ids_held,
    decode_slices,
    encode_ids_held,
    is_whole,
    slice_of,
)
from asyncckpt.errors import ConflictError, CorruptError, UsageError
from asyncckpt.format.strict_json import dumps, loads
from asyncckpt.model.table import IdsHeld
from asyncckpt.tables import HashTable, MultiLevelTable

pytestmark = pytest.mark.any_core

WEIGHT = torch.zeros(10, 4)


class RuledTable(HashTable):
    """One that owns ids by a rule which only it knows."""

    def owned(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return ids >= 0


def fixed(**place: int) -> FixedTable:
    return FixedTable("t", lambda: {"embedding": WEIGHT}, **place)


def shard(index: int, count: int) -> TableSlice:
    return TableSlice(count, index, index + 1)


def test_which_tables_are_replicas() -> None:
    assert is_whole(HashTable("t", 4, replicated=True))
    assert not is_whole(HashTable("t", 4, shard=(1, 2)))
    assert not is_whole(RuledTable("t", 4))
    assert is_whole(RuledTable("t", 4, replicated=True))
    assert is_whole(fixed())
    assert not is_whole(fixed(first_id=10))
    assert not is_whole(fixed(ids_end=20))


def test_what_tables_say() -> None:
    assert slice_of(HashTable("t", 4, shard=(1, 2))) == shard(1, 2)
    assert slice_of(HashTable("t", 4, shard=(5, 9, 16))) == TableSlice(16, 5, 9)
    assert str(slice_of(HashTable("t", 4, shard=(5, 9, 16)))) == "buckets 5 to 9 of 16"
    assert not is_whole(HashTable("t", 4, shard=(0, 16, 16))), "it is said, so it is no replica"
    assert slice_of(fixed(first_id=10)) == TableSlice(0, 10, 20)
    assert slice_of(fixed(first_id=10, ids_end=40)).encoded() == [0, 10, 20, 40]
    assert str(slice_of(RuledTable("t", 4))) == "ids by a rule of its own"
    assert slice_of(RuledTable("t", 4, shard=(1, 2))) == shard(1, 2), "what it says is believed before its rule"


def test_who_says_nothing_is_refused_by_name() -> None:
    levels = MultiLevelTable("m", 4, cache_rows=4, admit_after=2)
    tables = {"a": HashTable("a", 4), "b": HashTable("b", 4, shard=(2, 4)), "m": levels, **levels.companions()}
    whole = {name: table for name, table in tables.items() if name != "b"}
    check_said(whole, index=0, count=1)
    with pytest.raises(UsageError, match=r"tables 'a', 'm', 'candidates' do not say.*shard=\(2, 4\).*replicated=True"):
        check_said(tables, index=2, count=4)
    with pytest.raises(UsageError, match=r"shard of table 'b' on this rank must be \(1, 4\); got \(2, 4\)"):
        check_said({"b": tables["b"]}, index=1, count=4)
    check_said({"s": HashTable("s", 4, shard=(0, 4, 65_536))}, index=2, count=4)
    levels = MultiLevelTable("m", 4, cache_rows=4, admit_after=2, replicated=True)
    said = {"r": HashTable("r", 4, replicated=True), "s": tables["b"], "f": fixed(), "o": RuledTable("o", 4)}
    check_said({**said, "m": levels, **levels.companions()}, index=2, count=4)
    check_said({"b": tables["b"]}, index=0, count=8)  # Of a table over some of the ranks.


def test_a_part_is_refused_where_nobody_holds_the_rest() -> None:
    parts = {"shard 2 of 4": HashTable("t", 4, shard=(2, 4)), "rows 10 to 20": fixed(first_id=10)}
    for described, part in parts.items():
        with pytest.raises(UsageError, match=rf"'t' is a part.*{described}.*process_group=.*alone=True"):
            check_said({"t": part}, index=0, count=1)
        check_said({"t": part}, index=0, count=1, may_be_parts=True)
    check_said({"b": HashTable("b", 4, shard=(0, 16, 16))}, index=0, count=1)


def test_a_table_is_no_shard_and_replica_in_one() -> None:
    for make in (HashTable, lambda *args, **options: MultiLevelTable(*args, cache_rows=2, **options)):
        with pytest.raises(UsageError, match="cannot be a shard and a replica"):
            make("t", 4, shard=(0, 2), replicated=True)
        with pytest.raises(UsageError, match="replicated of table 't'"):
            make("t", 4, replicated=1)


@settings(deadline=None)
@given(
    st.lists(
        st.integers(1, 8).flatmap(
            lambda modulus: st.tuples(st.just(modulus), st.integers(0, modulus - 1), st.integers(1, modulus))
        ),
        min_size=2,
        max_size=4,
    )
)
def test_parts_with_an_id_in_common_are_a_conflict(slices: list[tuple[int, int, int]]) -> None:
    parts = [TableSlice(modulus, first, min(first + size, modulus)) for modulus, first, size in slices]
    ids = range(840)  # Divisible by all of the moduli.
    owned = [{id for id in ids if part.first <= id % part.modulus < part.end} for part in parts]
    is_apart = sum(map(len, owned)) == len(set().union(*owned))
    if is_apart and len(set().union(*owned)) == len(ids):
        check_slices([{"t": part} for part in parts], [set()] * len(parts))
    else:
        with pytest.raises(ConflictError, match="some ids are on no rank" if is_apart else "hold the same ids"):
            check_slices([{"t": part} for part in parts], [set()] * len(parts))


@pytest.mark.parametrize(
    ("parts", "ranks"),
    [
        ([TableSlice(0, 0, 5), TableSlice(0, 5, 9), TableSlice(0, 4, 5)], "ranks 0 and 2"),
        ([TableSlice(0, 0, 9), TableSlice(0, 2, 3)], "ranks 0 and 1"),
        ([shard(0, 2), shard(1, 2), shard(1, 2)], "ranks 1 and 2"),
        ([shard(0, 2), TableSlice(0, 1, 3)], "ranks 0 and 1"),
        ([TableSlice(65_536, 30_000, 65_536), TableSlice(65_536, 0, 30_001)], "ranks 0 and 1"),
        ([TableSlice(65_536, 0, 2), shard(3, 4), shard(1, 4)], "ranks 0 and 2"),
    ],
)
def test_the_same_part_of_a_table_twice(parts: list[TableSlice], ranks: str) -> None:
    with pytest.raises(ConflictError, match=f"table 't': {ranks}"):
        check_slices([{"t": part} for part in parts], [set()] * len(parts))


def test_parts_that_are_apart() -> None:
    for parts in (
        [TableSlice(0, 0, 5), TableSlice(0, 5, 9), TableSlice(0, 5, 5)],
        [TableSlice(0, 5, 9, 9), TableSlice(0, 0, 5, 9), TableSlice(0, 9, 9, 9), TableSlice(0, 0, 0, 9)],
        [shard(rank, 4) for rank in (3, 1, 2, 0)],
        [shard(0, 2), shard(1, 4), shard(3, 4)],
        [TableSlice(65_536, 0, 16_384), TableSlice(65_536, 16_384, 65_536)],
        [TableSlice(0, 0, 0)] * 3,  # Rules that nobody can compare.
    ):
        check_slices([{"t": part} for part in parts], [set()] * len(parts))


@pytest.mark.parametrize(
    "parts",
    [
        [TableSlice(0, 0, 5, 12), TableSlice(0, 5, 9, 12)],
        [TableSlice(0, 5, 9, 9), TableSlice(0, 9, 9, 9)],
        [TableSlice(0, 7, 9, 9), TableSlice(0, 0, 5, 9)],
        [TableSlice(0, 7, 9), TableSlice(0, 0, 5)],
        [TableSlice(0, 0, 0, 9), TableSlice(0, 0, 0, 9)],
    ],
)
def test_rows_that_no_rank_holds(parts: list[TableSlice]) -> None:
    by_rank = [decode_slices({"t": part.encoded()}, owner="") for part in parts]
    with pytest.raises(ConflictError, match=r"'t': some ids are on no rank.*'rank 0': 'rows .*save from all ranks"):
        check_slices(by_rank, [set()] * len(parts))
    check_slices(by_rank, [set()] * len(parts), are_all=False)


def test_a_replica_on_one_rank_and_a_part_on_another() -> None:
    with pytest.raises(ConflictError, match=r"'t' is a replica on rank 1, and a part of it on rank 0.*shard 0 of 2"):
        check_slices([{"t": shard(0, 2)}, {}], [set(), {"t"}])


def test_all_rows_on_one_rank_and_none_on_the_others() -> None:
    none = TableSlice(0, 1, 1, 1)
    check_slices([{}, {"t": none}, {"t": none}], [{"t"}, set(), set()])
    with pytest.raises(ConflictError, match=r"'t' is a replica on rank 0, and a part of it on rank 1.*rows 0 to 1"):
        check_slices([{}, {"t": TableSlice(0, 0, 1, 2)}], [{"t"}, set()])
    with pytest.raises(ConflictError, match="some ids are on no rank"):
        check_slices([{"t": none}, {"t": none}], [set(), set()])


def test_a_rule_of_its_own_on_one_rank_and_a_shard_on_another() -> None:
    parts = [{"t": TableSlice(0, 0, 0)}, {}, {"t": TableSlice(2, 1, 2)}]
    with pytest.raises(ConflictError, match="'t' holds ids by a rule of its own on rank 0, and others on rank 2"):
        check_slices(parts, [set()] * 3)


def test_other_ids_in_a_replica() -> None:
    held = {0: {"t": IdsHeld(5, 77), "u": IdsHeld(1, 3)}, 1: {}, 2: {"t": IdsHeld(5, 77)}}
    check_ids_held(held)
    check_ids_held({rank: decode_ids_held(encode_ids_held(own), owner="") for rank, own in held.items()})
    for other, found in ((IdsHeld(5, 78), "5 ids, other ones"), (IdsHeld(6, 77), "6 ids")):
        with pytest.raises(ConflictError, match=f"'t' is declared as replicated.* ranks 0 and 3, found {found}"):
            check_ids_held({**held, 3: {"t": other}})


@pytest.mark.parametrize("value", [None, [], {"a": 1}, {"a": [1]}, {"a": ["1", "1"]}, {"a": [1, "g"]}, {"a": [1, 1]}])
def test_nonsense_instead_of_counts(value: Any) -> None:
    with pytest.raises(CorruptError, match="rank 1"):
        decode_ids_held(value, owner="rank 1")


def test_parts_travel() -> None:
    parts = {"a": shard(3, 8), "b": TableSlice(0, 0, 5)}
    raw = dumps({name: part.encoded() for name, part in parts.items()})
    assert decode_slices(loads(raw, owner="test"), owner="rank 1") == parts
    assert (str(parts["a"]), str(parts["b"])) == ("shard 3 of 8", "rows 0 to 5")


@pytest.mark.parametrize("value", [None, [], {"a": "b"}, {"a": [1, 2]}, {"a": [1, 2, True]}, {"a": [-1, 0, 1]}])
def test_nonsense_from_another_rank(value: Any) -> None:
    with pytest.raises(CorruptError, match="rank 1"):
        decode_slices(value, owner="rank 1")
