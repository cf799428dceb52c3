"""All pairs of public operations on two threads of one process, with one Saver or two: nothing torn, lost or hanging.

The first one of a pair is held at a place, and the second one runs there. In turn at every place in the slow tests, at
one of them for each pair in the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asyncckpt.commit.attempt import Claims
from asyncckpt.engine.process.save_lock import RunningCalls, SaveLock
from tests.pairs.gate import Place, PlaceGate
from tests.pairs.operations import BY_NAME, OPERATIONS, Operation
from tests.pairs.run_pairs import operations_count, run_pair
from tests.pairs.world import TwoSides, check_no_directory_is_held
from tests.shares import share_of

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:no tensor of"),
]

WITH_SAVERS = [operation for operation in OPERATIONS if operation.traits & {"uses its Saver", "closes"}]
REMOVERS = {"run": "retention", "mcore": "sharded save"}
# Held while another thread removes what they read.
READERS = [
    "load",
    "load_async",
    "verify",
    "describe",
    "compact",
    "offline compact",
    "follow",
    "dcp.load",
    "sharded load",
]
REMOVES_S_MAX = 1.0  # No remover waits for a reader.
SHARES = (0.3, 0.6, 0.9)


@pytest.fixture
def gate() -> Iterator[PlaceGate]:
    with PlaceGate().watching() as gate:
        yield gate


@contextlib.contextmanager
def opened(gate: PlaceGate) -> Iterator[TwoSides]:
    world = TwoSides(gate)
    try:
        yield world
    finally:
        world.close()
    check_no_directory_is_held()


@pytest.fixture
def world(gate: PlaceGate) -> Iterator[TwoSides]:
    with opened(gate) as world:
        yield world


def places_of(operation: Operation, world: TwoSides, *, every: int = 0) -> list[Place]:
    """Where it can be held: in what the user gave it, and at some operations of the storage, or at every n-th."""
    count = operations_count(world, operation)
    numbers = range(1, count + 1, every) if every else sorted({1 + int(share * count) for share in SHARES if count})
    return [*operation.places, *numbers] or [None]


def run_row(first: Operation, seconds: list[Operation], world: TwoSides, *, sides: int) -> None:
    """Run an operation with each of the others, at one place after the other."""
    places = places_of(first, world)
    for number, second in enumerate(share_of(seconds, str(first)), OPERATIONS.index(first)):
        place = places[number % len(places)]
        was_held = run_pair(world, first, second, place, sides=sides)
        assert was_held or isinstance(place, int), f"{first} did not come to {place}"


@pytest.mark.parametrize("first", OPERATIONS, ids=str)
def test_two_threads(first: Operation, world: TwoSides) -> None:
    run_row(first, list(OPERATIONS), world, sides=1)


@pytest.mark.parametrize("first", WITH_SAVERS, ids=str)
def test_two_savers(first: Operation, world: TwoSides) -> None:
    run_row(first, WITH_SAVERS, world, sides=2)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", READERS)
def test_readers_beside_what_removes(name: str, every: int, world: TwoSides) -> None:
    """While it is held, what it reads is removed: it reads that all the same, or says that it is gone."""
    reader = BY_NAME[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.pairs.run_pairs.GRACE_S", REMOVES_S_MAX)
        for place in places_of(reader, world, every=every):
            run_pair(world, reader, BY_NAME[REMOVERS[reader.room]], place)


@pytest.mark.slow
@pytest.mark.parametrize("first", OPERATIONS, ids=str)
def test_two_threads_at_all_places(first: Operation, world: TwoSides) -> None:
    for place in places_of(first, world, every=8):
        for second in OPERATIONS:
            run_pair(world, first, second, place)


@pytest.mark.slow
@pytest.mark.parametrize("first", WITH_SAVERS, ids=str)
def test_two_savers_at_all_places(first: Operation, world: TwoSides) -> None:
    for place in places_of(first, world, every=4):
        for second in WITH_SAVERS:
            run_pair(world, first, second, place, sides=2)


# -- controls: without what keeps operations apart, pairs show it


@pytest.mark.parametrize(
    ("first", "second", "place"),
    [
        ("save_async", "load", "state_dict"),
        ("load", "save_async", "fill"),
        ("load_async", "blocking save", "load_state_dict"),
        ("dcp.load", "queued save", "fill"),
    ],
)
def test_without_the_save_lock_checkpoints_are_torn(
    gate: PlaceGate, monkeypatch: pytest.MonkeyPatch, first: str, second: str, place: Place
) -> None:
    with opened(gate) as world:
        monkeypatch.setattr(SaveLock, "acquire", lambda *_, **__: True)
        monkeypatch.setattr(SaveLock, "release", lambda *_: None)
        with pytest.raises(AssertionError, match="torn"):
            run_pair(world, BY_NAME[first], BY_NAME[second], place)
        monkeypatch.undo()


def without_looking_again(_: object, look: Callable[[], Any]) -> Any:
    return look()


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("verify", "engine.load.verify"),
        ("describe", "checkpoints"),
        ("follow", "engine.follow.table_update"),
        ("sharded load", "strategies.stored_state"),
        ("dcp.load", "dcp.reader"),
    ],
)
def test_without_a_second_look_readers_find_damage(
    gate: PlaceGate, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setattr(f"asyncckpt.{module}.look_again", without_looking_again)
    with opened(gate) as world, pytest.raises(AssertionError, match=f"{name} beside .* failed"):
        test_readers_beside_what_removes(name, 1, world)


def test_without_a_claim_compactions_are_removed_while_they_commit(
    gate: PlaceGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Claims.needed

    def of_saves(claims: Claims, place: tuple[int, int]) -> set[int]:
        return plain(claims, place) - {claim.step for claim in claims.held.values() if claim.kind == "compaction"}

    monkeypatch.setattr(Claims, "needed", of_saves)
    with opened(gate) as world, pytest.raises(AssertionError, match="compact beside retention failed"):
        test_readers_beside_what_removes("compact", 1, world)


def test_a_saver_that_closes_beside_a_call_is_found(gate: PlaceGate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunningCalls, "wait", lambda *_: None)
    with opened(gate) as world, pytest.raises(AssertionError, match="save_async beside close failed"):
        run_pair(world, BY_NAME["save_async"], BY_NAME["close"], "state_dict")
