"""Run two operations at the same time: the first one is held at a place, and the second one runs there.

Then everything must be as the world says. What the two have loaded and saved is looked at generation by generation.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Iterable

from asyncckpt import list_steps
from tests.pairs.gate import Place
from tests.pairs.operations import Operation, cause_of, may_raise
from tests.pairs.world import TwoSides

END_S_MAX = 60.0
GRACE_S = 0.03  # So long the second one may run before the first one goes on; it may wait for that.


class Running:
    """An operation on a thread of its own."""

    def __init__(self, operation: Operation, world: TwoSides, side: int) -> None:
        self.operation = operation
        self.side = side
        self.step: int | None = None
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(world,), name=f"pairs {operation}", daemon=True)
        self._thread.start()

    def _run(self, world: TwoSides) -> None:
        try:
            self.step = self.operation.run(world, self.side)
        except BaseException as error:
            self.error = cause_of(error)
        finally:
            self.ended.set()

    def join(self) -> None:
        if not self.ended.wait(END_S_MAX):
            faulthandler.dump_traceback(sys.stderr)
            raise AssertionError(f"{self.operation} hangs")
        self._thread.join()


def overlap(world: TwoSides, first: Operation, second: Operation, place: Place, *, sides: int) -> list[Running]:
    """Hold the first operation at a place, run the second one beside it; both have ended when it returns."""
    gate = world.gate
    gate.arm(place)
    held = Running(first, world, 0)
    while place is not None and not gate.reached.wait(0.001) and not held.ended.is_set():
        pass
    beside = Running(second, world, sides - 1)
    beside.ended.wait(GRACE_S)
    gate.open()
    for running in (held, beside):
        running.join()
    return [held, beside]


def operations_count(world: TwoSides, operation: Operation) -> int:
    """How many operations of the storage it makes alone."""
    world.renew(1)
    world.gate.arm(None)
    alone = Running(operation, world, 0)
    alone.join()
    count = world.gate.operations_count
    assert alone.error is None, f"{operation} failed alone: {alone.error!r}"
    check_world(world, [alone])
    return count


def run_pair(world: TwoSides, first: Operation, second: Operation, place: Place, *, sides: int = 1) -> bool:
    """Run a pair in a world, and check all that must be true. Returns whether the first one came to the place."""
    gate = world.gate
    gate.arm(None)
    world.renew(sides, {first.room, second.room})
    ended = overlap(world, first, second, place, sides=sides)
    was_held = place is None or gate.reached.is_set()
    gate.arm(None)
    check_outcomes(ended, sides=sides)
    check_world(world, ended)
    return was_held


def check_outcomes(ended: Iterable[Running], *, sides: int) -> None:
    one, two = ended
    for own, other in ((one, two), (two, one)):
        if own.error is not None and not may_raise(own.operation, other.operation, own.error, same_saver=sides == 1):
            raise AssertionError(f"{own.operation} beside {other.operation} failed") from own.error


def check_world(world: TwoSides, ended: Iterable[Running]) -> None:
    """Nothing is held, torn or lost, and one more save commits."""
    ended = list(ended)
    for running in ended:
        running.error = None  # Its traceback may hold what dcp.async_save has staged.
    traits = frozenset().union(*(running.operation.traits for running in ended))
    world.check_nothing_held()
    world.reopen()
    known = {generation for pair in world.steps.values() for generation in pair} | {world.live} | world.foreign
    dense, rest = world.state.generation()
    allowed = known if traits & {"fills", "dense"} else {world.live}
    assert {dense, rest} <= allowed, f"live is {dense}, {rest}, not of {allowed}"
    assert dense == rest or "dense" in traits, f"the live state is torn: {dense}, {rest}"
    _check_steps(world, {running.step for running in ended if running.step is not None}, allowed, traits)
    if "emb" in {running.operation.room for running in ended}:
        module = world.state.module_generation()
        assert module == world.live or ("module" in traits and module in known), "the module has changed"
        assert world.module_loaded() in known
    world.check_last_save()


def _check_steps(world: TwoSides, saved: set[int], allowed: set[float], traits: frozenset[str]) -> None:
    """What was there is what it was, what is new was acknowledged, and holds one generation of this time."""
    found = list_steps(world.run)
    assert set(found) <= saved | world.steps.keys(), f"steps {found}, acknowledged were {saved}"
    if "removes" not in traits:
        assert saved | world.steps.keys() == set(found), f"steps are lost: there are {found}"
    for step in found:
        dense, rest = world.loaded(step)
        if step in world.steps:
            assert (dense, rest) == world.steps[step], f"step {step} holds {dense}, {rest}"
        else:
            assert {dense, rest} <= allowed, f"step {step} holds {dense}, {rest}, not of {allowed}"
            assert dense == rest or "dense" in traits, f"step {step} is torn: {dense}, {rest}"
            world.steps[step] = dense, rest
