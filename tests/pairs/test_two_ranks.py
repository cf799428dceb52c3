"""Pairs of public operations of two ranks, which save together: both ranks run both at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pairs.gate import Place
from tests.pairs.operations import OPERATIONS, Operation
from tests.pairs.rank_pairs import RANKS_COUNT, run_pairs
from tests.ranks.forked import run

pytestmark = pytest.mark.timeout(300)

# Operations of a group of ranks, and what ranks do for themselves beside them. Two operations of DCP, or of the
# strategies, at once would mix up the messages of one process group.
TOGETHER = [operation for operation in OPERATIONS if operation.room == "run" and operation.name != "offline compact"]
SAMPLE_STRIDE, SAMPLE_OFFSET = 5, 2
Pair = tuple[str, str, Place, int]


def pairs_of(first: Operation, *, sides: int) -> list[Pair]:
    places = first.places or (None,)
    others = [second for second in TOGETHER if not first.name == second.name == "dcp.load"]
    return [(first.name, second.name, places[number % len(places)], sides) for number, second in enumerate(others)]


def sample() -> list[Pair]:
    return [
        pairs[(number * SAMPLE_STRIDE + SAMPLE_OFFSET) % len(pairs)]
        for number, first in enumerate(TOGETHER)
        for pairs in [pairs_of(first, sides=1 + number % 2)]
    ]


def test_two_ranks(tmp_path: Path) -> None:
    assert run(run_pairs, RANKS_COUNT, tmp_path, sample()) == [0] * RANKS_COUNT


@pytest.mark.slow
@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("first", TOGETHER, ids=str)
def test_all_pairs(tmp_path: Path, first: Operation, sides: int) -> None:
    assert run(run_pairs, RANKS_COUNT, tmp_path, pairs_of(first, sides=sides)) == [0] * RANKS_COUNT
