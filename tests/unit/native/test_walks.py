"""The core follows a walk through objects of Python, takes what is there now, and holds none of it."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import numpy as np
import pytest

from asyncckpt.native import core, torch_calls, walks
from asyncckpt.native.tensors import PythonCalls
from asyncckpt.native.walks import KnownWalk, WalkWords

native_only = pytest.mark.skipif(not torch_calls.CAN_READ, reason="the twin follows nothing, nor does torch 2.4")


class Held:
    """An object that can be referred to weakly."""


class HeldList(list[Any]):
    pass


def walk_of(state: dict[str, Any]) -> KnownWalk:
    """Take the value of "taken", in a dict, a list or an object."""
    made = WalkWords()

    def visit(key: object, value: Any) -> None:
        if type(value) is dict:
            made.mapping(value, visit)
        elif type(value) in (list, tuple):
            made.items(value, visit)
        elif type(value) is Held:
            made.instance(value, visit, slot=1)
        elif value == 5:
            made.take(0, int)
        else:
            made.anything()

    visit(None, state)
    walk = KnownWalk.of(made, slots=2)
    assert walk is not None
    return walk


def state_of() -> dict[str, Any]:
    held = Held()
    held.inner = [5, "other"]  # type: ignore[attr-defined]
    return {"held": held, "more": ()}


@native_only
def test_what_is_taken_is_what_is_there_now() -> None:
    state = state_of()
    walk = walk_of(state)
    state["held"].inner[:] = [7, None]
    found = walk.take(state)
    assert found is not None
    assert found[0] == 7
    assert found[1] is state["held"]
    other = state_of()
    found = walk.take({key: other[key] for key in other})
    assert found is not None
    assert found[1] is other["held"]


@native_only
@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(another=1),
        lambda state: state.pop("more"),
        lambda state: state.update(held=state.pop("held")),
        lambda state: state.update(held=5),
        lambda state: setattr(state["held"], "another", 1),
        lambda state: delattr(state["held"], "inner"),
        lambda state: setattr(state["held"], "inner", (5, "other")),
        lambda state: setattr(state["held"], "inner", HeldList([5, "other"])),
        lambda state: state["held"].inner.append(1),
        lambda state: state["held"].inner.pop(),
        lambda state: state["held"].inner.__setitem__(0, 5.0),
        lambda state: state["held"].inner.__setitem__(0, True),
        lambda state: state.update(more=[]),
    ],
)
def test_a_change_of_form_is_seen(change: Any) -> None:
    state = state_of()
    walk = walk_of(state)
    assert walk.take(state) is not None
    change(state)
    assert walk.take(state) is None


@native_only
def test_nothing_is_held_and_no_reference_is_lost() -> None:
    state = state_of()
    walk = walk_of(state)
    held = state["held"]
    before = sys.getrefcount(held), sys.getrefcount(vars(held)), sys.getrefcount(None)
    for _ in range(1000):
        assert walk.take(state) is not None
    after = sys.getrefcount(held), sys.getrefcount(vars(held)), sys.getrefcount(None)
    assert after[:2] == before[:2]
    assert abs(after[2] - before[2]) < 500
    reference = weakref.ref(held)
    state.clear()
    del held
    assert reference() is None


@native_only
def test_no_other_thread_of_python_runs_meanwhile() -> None:
    from asyncckpt.native import declarations

    assert "ac_walk" in declarations.HOLDING_GIL


@native_only
def test_a_walk_that_does_not_see_what_is_there_is_not_used() -> None:
    calls = walks.python_calls()
    assert calls is not None
    assert walks._sees_what_is_there(calls)
    for number in (3, 4):  # Items of lists by the function for tuples, and the other way around.
        functions = list(calls.functions)
        functions[number] = functions[7 - number]
        with pytest.raises(SystemError):
            walks._sees_what_is_there(PythonCalls(tuple(functions), calls.type_offset))


def test_the_twin_follows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "torch_calls", lambda: None)
    assert KnownWalk.of(WalkWords(), slots=0) is None
    if core.implementation == "twin":
        assert core.walk(PythonCalls((), 0), {}, np.zeros(1, np.uint64), 0) is None
