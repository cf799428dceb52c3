"""Pairs of public operations of two processes in the same directories, of which the first one holds the LOCK of some.

Readers of the second process see whole checkpoints, whatever the first one writes and removes; writers are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncckpt.errors import ConflictError
from tests.pairs.gate import Place, PlaceGate
from tests.pairs.operations import BY_NAME, OPERATIONS, Operation, may_raise
from tests.pairs.other_process import OtherProcess, OutcomeOfOperation, other_process
from tests.pairs.run_pairs import GRACE_S, Running, check_world
from tests.pairs.world import FOREIGN, TwoSides, check_no_directory_is_held

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:no tensor of"),
]

# In these the first process has a Saver open all the time.
HELD_ROOMS = ("run", "emb")
# Of every pair in turn the second one of a sample.
SAMPLE_STRIDE, SAMPLE_OFFSET = 7, 3
READERS = {
    "load": "retention",
    "verify": "retention",
    "follow": "retention",
    "describe": "retention",
    "dcp.load": "retention",
}
READERS |= {"sharded load": "sharded save"}
READER_PLACES = (5, 9, 14, 20)


@pytest.fixture
def world() -> Iterator[TwoSides]:
    with PlaceGate().watching() as gate:
        world = TwoSides(gate)
        try:
            yield world
        finally:
            world.close()
        check_no_directory_is_held()


@pytest.fixture
def other(world: TwoSides, tmp_path: Path) -> Iterator[OtherProcess]:
    with other_process(world.folder, tmp_path / "output") as other:
        yield other


def run_pair(
    world: TwoSides, other: OtherProcess, own: Operation, its: Operation, place: Place, *, holds_its: bool
) -> None:
    """Hold one of the two at a place, run the other one there, and check what both have done."""
    world.gate.arm(None)
    world.renew(1)
    world.saver("pruner")
    if holds_its:
        other.begin(its, 1 if place is None else place)
        running = Running(own, world, 0)
        running.ended.wait(GRACE_S)
        other.open()
    else:
        world.gate.arm(place)
        running = Running(own, world, 0)
        while place is not None and not world.gate.reached.wait(0.001) and not running.ended.is_set():
            pass
        other.begin(its, None)
        other.has_ended(GRACE_S)
        world.gate.open()
    running.join()
    outcome = other.outcome()
    world.gate.arm(None)
    world.foreign |= set(outcome.generations)
    pair = f"{own} beside {its} of the other process"
    check_own(running, its, pair)
    check_other(world, outcome, own, its, pair)
    check_world(world, [running])


def check_own(running: Running, its: Operation, pair: str) -> None:
    own, error = running.operation, running.error
    is_conflict = isinstance(error, ConflictError) and own.room == its.room and own.room not in HELD_ROOMS
    if error is not None and not is_conflict and not may_raise(own, its, error, same_saver=False):
        raise AssertionError(f"{pair} failed") from error


def gives_up(own: Operation) -> bool:
    """Whether it may give back, before the other process asks, the directory in which nobody else writes meanwhile."""
    return "closes modules" in own.traits


def check_other(world: TwoSides, outcome: OutcomeOfOperation, own: Operation, its: Operation, pair: str) -> None:
    if "writes" in its.traits and its.room in HELD_ROOMS and not (gives_up(own) and outcome.error is None):
        assert isinstance(outcome.error, ConflictError), f"{pair}: not refused, but {outcome.error!r}"
    elif outcome.error is not None:
        is_conflict = isinstance(outcome.error, ConflictError) and its.room == own.room and "writes" in its.traits
        if not is_conflict and not may_raise(its, own, outcome.error, same_saver=False):
            raise AssertionError(f"{pair}: that failed") from outcome.error
    dense, rest = outcome.generations
    assert dense == rest or "dense" in its.traits, f"{pair}: the state there is torn: {outcome.generations}"
    if its.traits & {"fills"} and outcome.error is None:
        assert rest in {generation for pair in world.steps.values() for generation in pair} | {world.live}
        assert rest < FOREIGN


def sample() -> Iterator[tuple[Operation, Operation]]:
    for number, first in enumerate(OPERATIONS):
        yield first, OPERATIONS[(number * SAMPLE_STRIDE + SAMPLE_OFFSET) % len(OPERATIONS)]


def test_pairs(world: TwoSides, other: OtherProcess) -> None:
    for own, its in sample():
        run_pair(world, other, own, its, next(iter(own.places), None), holds_its=False)
        run_pair(world, other, own, its, next(iter(its.places), None), holds_its=True)


def test_what_the_other_process_reads_is_removed(world: TwoSides, other: OtherProcess) -> None:
    for name in READERS:
        check_reader(world, other, name)


def check_reader(world: TwoSides, other: OtherProcess, name: str) -> None:
    for place in READER_PLACES:
        run_pair(world, other, BY_NAME[READERS[name]], BY_NAME[name], place, holds_its=True)


def test_a_process_that_looks_once_finds_damage(world: TwoSides, tmp_path: Path) -> None:
    def check_often(other: OtherProcess) -> None:
        for _ in range(20):  # Whether it looks in the middle of something depends on the time that it is given.
            check_reader(world, other, "load")

    with (
        other_process(world.folder, tmp_path / "output", looks_once=True) as other,
        pytest.raises(AssertionError, match="load of the other process: that failed"),
    ):
        check_often(other)


@pytest.mark.slow
@pytest.mark.parametrize("own", OPERATIONS, ids=str)
def test_all_pairs(world: TwoSides, other: OtherProcess, own: Operation) -> None:
    for its in OPERATIONS:
        for place in (*own.places, *READER_PLACES):
            run_pair(world, other, own, its, place, holds_its=False)
        for place in (*its.places, *READER_PLACES):
            run_pair(world, other, own, its, place, holds_its=True)
