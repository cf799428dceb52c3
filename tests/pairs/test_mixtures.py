"""Random programs of operations on two threads, each with a Saver of its own; the first one is held at some place."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from asyncckpt.engine.process.save_lock import SaveLock
from tests.pairs.gate import Place, PlaceGate
from tests.pairs.operations import OPERATIONS, Operation, may_raise
from tests.pairs.run_pairs import GRACE_S, Running, check_world
from tests.pairs.world import SIDES, TwoSides, check_no_directory_is_held

pytestmark = [
    pytest.mark.random,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:no tensor of"),
]

EXAMPLES_COUNT = 20
MANY_FACTOR = 50
CONTROL_EXAMPLES_COUNT = 60
PROGRAM_LENGTH_MAX = 5
STORAGE_PLACES: tuple[Place, ...] = (3, 10, 25)
PROGRAM = st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=PROGRAM_LENGTH_MAX)
PROGRAMS = st.tuples(PROGRAM, PROGRAM)


class OperationsOfSide:
    """The operations of one side, one after the other on a thread."""

    def __init__(self, operations: Sequence[Operation], world: TwoSides, side: int) -> None:
        self.ended: list[Running] = []
        self.is_over = threading.Event()
        self._work = (operations, world, side)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        operations, world, side = self._work
        for operation in operations:
            running = Running(operation, world, side)
            self.ended.append(running)
            running.ended.wait()
        self.is_over.set()

    def join(self) -> None:
        while not self.is_over.wait(0.01):
            for running in list(self.ended):
                running.join()


def run_programs(programs: Sequence[Sequence[Operation]], place: Place) -> None:
    with PlaceGate().watching() as gate:
        world = TwoSides(gate)
        try:
            world.renew(SIDES)
            gate.arm(place)
            begun = [OperationsOfSide(programs[0], world, 0)]
            while not gate.reached.wait(0.001) and not begun[0].is_over.is_set():
                pass
            begun.append(OperationsOfSide(programs[1], world, 1))
            begun[1].is_over.wait(GRACE_S)
            gate.open()
            for program in begun:
                program.join()
            gate.arm(None)
            check_programs(begun)
            check_world(world, [running for program in begun for running in program.ended])
        finally:
            world.close()
    check_no_directory_is_held()


def check_programs(programs: Sequence[OperationsOfSide]) -> None:
    for program in programs:
        for running in program.ended:
            others = [(other, one is program) for one in programs for other in one.ended if other is not running]
            error = running.error
            if error is not None and not any(
                may_raise(running.operation, other.operation, error, same_saver=is_own) for other, is_own in others
            ):
                names = [[str(other.operation) for other in one.ended] for one in programs]
                raise AssertionError(f"{running.operation} failed in {names}") from error


def check_mixtures(programs_count: int, **options: Any) -> None:
    @settings(max_examples=programs_count, deadline=None, suppress_health_check=list(HealthCheck), **options)
    @given(programs=PROGRAMS, number=st.integers(0, 99))
    def holds(programs: Sequence[Sequence[Operation]], number: int) -> None:
        places = [*(place for operation in programs[0] for place in operation.places), *STORAGE_PLACES]
        run_programs(programs, places[number % len(places)])

    holds()


def test_mixtures(runs_factor: int) -> None:
    check_mixtures(runs_factor * EXAMPLES_COUNT)


@pytest.mark.slow
def test_many_mixtures() -> None:
    check_mixtures(MANY_FACTOR * EXAMPLES_COUNT)


def test_without_the_save_lock_some_mixture_is_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SaveLock, "acquire", lambda *_, **__: True)
    monkeypatch.setattr(SaveLock, "release", lambda *_: None)
    with pytest.raises(AssertionError, match="torn"):
        check_mixtures(CONTROL_EXAMPLES_COUNT, phases=[Phase.generate], report_multiple_bugs=False)
