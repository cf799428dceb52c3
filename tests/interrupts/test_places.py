"""The places of a call are those where CPython looks for signals, and what is held is seen whoever holds it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from asyncckpt.staging.pool import pool
from tests.interrupts.places import interrupt, places_of
from tests.interrupts.world import held_locks

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 looks for signals in other places")


def _for_loop() -> None:
    for _ in (1, 2, 3):
        pass


def _while_loop() -> None:
    count = 3
    while count:
        count -= 1


@pytest.mark.parametrize("loop", [_for_loop, _while_loop])
def test_a_loop_is_interrupted_at_its_jump_backward(loop: Callable[[], None]) -> None:
    places = places_of(loop)
    assert len(places) == 3  # The beginning, and two of three jumps: later ones are like the second.
    assert all(interrupt(loop, place) for place in places)


def test_a_call_that_raises_does_not_look() -> None:
    def fails() -> None:
        try:
            int("x")
        except ValueError:
            return

    assert len(places_of(fails)) == 1


def test_a_guard_that_this_thread_holds_is_seen() -> None:
    assert held_locks() == []
    with pool._changed:
        assert len(held_locks()) == 1
