"""Which requests reads become: every byte is fetched once, long reads are taken apart, near ones put together."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.native import Reads
from asyncckpt.shard.store_files import GAP_SHARE, REQUEST_BYTES_MAX, _Request, _requests

MIB = 1 << 20


def requests(reads: list[tuple[int, int, int]]) -> list[_Request]:
    """The requests of reads of (file, offset, bytes), one behind the other in memory."""
    ends = np.cumsum([0, *(size for _, _, size in reads)])
    places = np.array([(ends[i], offset, size) for i, (_, offset, size) in enumerate(reads)], dtype=np.uint64)
    numbers = np.array([number for number, _, _ in reads], dtype=np.int32)
    return list(_requests(Reads(places.reshape(-1, 3), numbers, np.zeros(len(reads), np.int32))))


def test_what_lies_side_by_side_is_one_request() -> None:
    found = requests([(0, 100, 50), (0, 150, 50), (0, 0, 100), (1, 0, 10)])
    assert [(one.number, one.begin, one.end) for one in found] == [(0, 0, 200), (1, 0, 10)]


def test_a_long_read_is_several() -> None:
    found = requests([(0, 7, 20 * MIB)])
    assert [one.end - one.begin for one in found] == [8 * MIB, 8 * MIB, 4 * MIB]


def test_small_gaps_are_read_and_large_ones_are_not() -> None:
    assert [(one.begin, one.end) for one in requests([(0, 0, 1000), (0, 1040, 1000)])] == [(0, 2040)]
    assert [(one.begin, one.end) for one in requests([(0, 0, 1000), (0, 1240, 1000)])] == [(0, 1000), (1240, 2240)]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 40 * MIB), st.sampled_from([1, 100, 4096, MIB, 9 * MIB])),
        max_size=30,
    )
)
def test_every_byte_comes_once_and_little_else(reads: list[tuple[int, int, int]]) -> None:
    found = requests(reads)
    wanted = sorted((number, offset, size) for number, offset, size in reads)
    pieces = sorted((one.number, offset, target, size) for one in found for target, offset, size in one.parts)
    assert sum(size for *_, size in pieces) == sum(size for *_, size in wanted)
    targets = sorted((target, size) for _, _, target, size in pieces)
    assert all(begin + size == after for (begin, size), (after, _) in itertools.pairwise(targets))
    for one in found:
        assert one.end - one.begin <= REQUEST_BYTES_MAX
        assert one.end - one.begin <= (1 + GAP_SHARE) * sum(size for _, _, size in one.parts)
        assert all(one.begin <= offset and offset + size <= one.end for _, offset, size in one.parts)
