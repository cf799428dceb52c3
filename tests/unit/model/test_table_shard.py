"""Which ids a shard holds, against the rule in plain numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.model.owned_ids import owned_mask
from asyncckpt.model.table_shard import (
    Shard,
    buckets_of,
    described,
    is_part,
    is_shard,
    make_up,
    may_share_ids,
    slice_info,
)

pytestmark = pytest.mark.any_core

SIZES = st.one_of(st.integers(1, 12), st.sampled_from([64, 65_536, 2**63 - 1]))


@st.composite
def shards(draw: st.DrawFn, sizes: st.SearchStrategy[int] = SIZES) -> Shard:
    size = draw(sizes)
    begin = draw(st.integers(0, size - 1))
    return draw(st.sampled_from([(begin, size), (begin, draw(st.integers(begin + 1, size)), size)]))


@given(shards(), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_a_shard_holds_its_buckets_of_unsigned_ids(shard: Shard, ids: list[int]) -> None:
    begin, end, size = buckets_of(shard)
    ids += [value - 2**64 if value >= 2**63 else value for value in (begin, end - 1, end, 2**64 - 1)]
    found = owned_mask(np.array(ids, dtype=np.int64), shard=shard)
    assert found.tolist() == [begin <= id % 2**64 % size < end for id in ids]


@given(shards(st.integers(1, 8)), shards(st.integers(1, 8)))
def test_shards_with_an_id_in_common(one: Shard, other: Shard) -> None:
    ids = np.arange(840)  # Divisible by all of the sizes.
    both = owned_mask(ids, shard=one) & owned_mask(ids, shard=other)
    assert may_share_ids(one, other) == may_share_ids(other, one) == bool(both.any())


def test_a_shard_in_words() -> None:
    assert [described((1, 4)), described((0, 21_846, 65_536))] == ["shard 1 of 4", "buckets 0 to 21846 of 65536"]
    assert [slice_info((0, 1)), slice_info((3, 12)), slice_info((0, 21_846, 65_536))] == [
        "0@1@1",
        "03@04@12",
        "00000@21846@65536",
    ]


@pytest.mark.parametrize("value", [None, 1, "0@1@2", [0, 1], (), (0,), (0.0, 1), (False, 1), (0, 1, 2, 3)])
def test_what_is_no_shard(value: Any) -> None:
    assert not is_shard(value)


@pytest.mark.parametrize(
    "value", [(0, 0), (1, 1), (-1, 2), (0, 2**63), (0, 0, 4), (2, 1, 4), (3, 5, 4), (-1, 1, 4), (0, 1, 2**63)]
)
def test_what_holds_no_ids(value: Any) -> None:
    assert not is_shard(value)


@given(st.lists(shards(st.integers(1, 8)), max_size=4), shards(st.integers(1, 8)))
def test_shards_that_make_up_another(listed: list[Shard], wanted: Shard) -> None:
    ids = np.arange(840)
    held: list[np.ndarray[Any, Any]] = []
    for shard in listed:  # No two with an id in common.
        own = owned_mask(ids, shard=shard)
        if not any((own & other).any() for other in held):
            held.append(own)
    apart = [shard for shard in listed if any((owned_mask(ids, shard=shard) == own).all() for own in held)]
    missing = owned_mask(ids, shard=wanted) & ~np.logical_or.reduce([np.zeros(len(ids), dtype=bool), *held])
    apart = list({owned_mask(ids, shard=shard).tobytes(): shard for shard in apart}.values())
    assert make_up(apart, wanted) == (not missing.any())
    assert is_part(wanted) == (not owned_mask(ids, shard=wanted).all())
