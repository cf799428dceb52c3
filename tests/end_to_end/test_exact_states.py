"""A state that only equals the one before, and is not the same, is not saved as that one."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt

# Each equals the one before; twice, so that a kept walk or plan of the first is there.
VALUES = [1, 1, True, True, 1, 1.0, 1.0, True, 1.0, 0, 0, False, False, 0.0, 0.0, -0.0, -0.0, 0, -0.0, 0.0, False, 0]


def with_key(value: Any) -> Any:
    return {"x": {value: torch.ones(2)}}


def with_value(value: Any) -> Any:
    return {"x": [value, {"deep": (value,)}]}


def with_fact(value: Any) -> Any:
    state: Any = OrderedDict(w=torch.ones(2))
    state._metadata = OrderedDict({"": {"version": value, "more": {value: [value]}}})
    return {"x": state}


class Asked:
    """An object that is asked at each save, with other things that are followed beside it."""

    def __init__(self, value: Any, made: Any) -> None:
        self.value, self.made = value, made

    def state_dict(self) -> Any:
        return self.made(self.value)["x"]


def shown(state: Any) -> str:
    return repr((state, getattr(state["x"], "_metadata", None)))


@pytest.mark.parametrize("made", [with_key, with_value, with_fact])
@pytest.mark.parametrize("asked", [False, True])
def test_a_state_that_equals_the_one_before_is_saved_as_it_is(tmp_path: Path, made: Any, asked: bool) -> None:
    owner, state = Asked(None, made), {"x": None}
    with asyncckpt.Saver(path=tmp_path / "d", tensors=state) as saver:
        for step, value in enumerate(VALUES):
            owner.value = value
            state["x"] = owner if asked else made(value)["x"]
            saver.save(step)
            assert shown(asyncckpt.load(tmp_path / "d", step)) == shown(made(value))


def test_a_key_that_takes_the_place_of_an_equal_one_is_saved_as_it_is(tmp_path: Path) -> None:
    inner = {0.0: torch.ones(2)}
    with asyncckpt.Saver(path=tmp_path / "d", tensors={"x": inner}) as saver:
        saver.save(0)
        inner[-0.0] = inner.pop(0.0)
        saver.save(1)
    assert repr(list(asyncckpt.load(tmp_path / "d", 1)["x"])) == "[-0.0]"
