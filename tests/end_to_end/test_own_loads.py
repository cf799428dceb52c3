"""Optimizers that load in a way of their own, that are none of torch's, or that have a part of a tensor: each goes on
with the state of its own parameters, or stays as it is.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import asyncckpt
from asyncckpt.errors import IncompatibleError
from asyncckpt.plan import image
from asyncckpt.trainer_state import TrainerState
from tests.end_to_end.test_changed_optimizers import State, layers, restore
from tests.end_to_end.test_other_optimizers import kept
from tests.end_to_end.test_trainer_states import FloatMasters, step, stepped


class OwnLoad(torch.optim.AdamW):
    """Loads in a way of its own, by the numbers of parameters, as those of bitsandbytes."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("inside", [0, 1])
@pytest.mark.parametrize(
    ("names", "call", "why"),
    [
        ("ba", {}, "has its parameters in another order"),
        ("ba", {"strict": False}, "has its parameters in another order"),
        ("abc", {"strict": False}, r"has groups of \[3\] parameters, the checkpoint \[2\]"),
        ("ac", {"strict": False}, "has a parameter 1 that is not loaded"),
        ("ab", {"strict": False, "resize": ["m"]}, "has a parameter 0 that is of another shape"),
        ("ab", {}, ""),
    ],
)
def test_an_optimizer_that_loads_in_its_own_way_is_taken_as_a_whole_or_not(
    tmp_path: Path, names: str, call: State, why: str, inside: int
) -> None:
    """It got the moments of other parameters, of other shapes, or failed when all was filled."""

    def made(names: str, size: int = 2) -> tuple[Any, State]:
        model = nn.ModuleDict({name: nn.Linear(2, size, bias=False) for name in names})
        optimizer = OwnLoad(model.named_parameters(), lr=0.25)
        return optimizer, {"m": model, "t": TrainerState(o=optimizer) if inside else optimizer}

    optimizer, state = made("ab")
    step(state["m"], optimizer)
    kept(tmp_path, state)
    optimizer, state = made(names, 3 if "resize" in call else 2)
    before = [parameter.clone() for parameter in state["m"].parameters()]
    if why and call.get("strict", True):
        with pytest.raises(IncompatibleError, match=why):
            restore(tmp_path, state, **call)
        assert all(map(torch.equal, state["m"].parameters(), before))
        return
    report, told = restore(tmp_path, state, **call)
    assert len(optimizer.state) == (0 if why else 2)
    assert len(told) == bool(why)
    if why:
        assert ("t.o" if inside else "t") in report.missing


class Merged(OwnLoad):
    """Saves its groups as one."""

    def state_dict(self) -> dict[str, Any]:
        first, *others = super().state_dict()["param_groups"]
        params = [*first["params"], *(number for group in others for number in group["params"])]
        return {**super().state_dict(), "param_groups": [{**first, "params": params}]}

    def load_state_dict(self, state_dict: Any) -> None:
        groups = super().state_dict()["param_groups"]
        OwnLoad.load_state_dict(self, {**state_dict, "param_groups": groups})


@pytest.mark.parametrize("strict", [True, False])
def test_an_optimizer_that_saves_other_groups_than_it_has_goes_on(tmp_path: Path, strict: bool) -> None:
    """It was refused, in a program that had not changed."""

    def made() -> tuple[Any, State]:
        model = layers("ab")
        optimizer = Merged([{"params": [each]} for each in model.parameters()], lr=0.25)
        step(model, optimizer)
        return optimizer, {"m": model, "o": optimizer}

    optimizer, state = made()
    kept(tmp_path, state)
    wanted = step(state["m"], optimizer, 20)
    optimizer, state = made()
    step(state["m"], optimizer, 2)
    report, told = restore(tmp_path, state, strict=strict)
    assert (list(report.missing), told, step(state["m"], optimizer, 20)) == ([], [], wanted)


@pytest.mark.parametrize("kind", [OwnLoad, FloatMasters, torch.optim.AdamW, torch.optim.Adafactor])
@pytest.mark.parametrize("call", [{}, {"strict": False}, {"rename": {"m": "n"}}])
@pytest.mark.parametrize(
    ("now", "block_bytes"),
    [
        *itertools.product([(0, 2, 4), (2, 2, 4), (0, 3, 4), (0, 2, 6), (2, 2, 6)], [image.BLOCK_BYTES_MAX]),
        *itertools.product([(0, 2, 4), (2, 2, 4), (0, 2, 6), (2, 2, 6)], [8]),
    ],
)
def test_an_optimizer_of_the_local_part_of_a_tensor_keeps_its_state_or_gets_none_of_another_part(
    tmp_path: Path, kind: Any, call: State, now: tuple[int, int, int], block_bytes: int, monkeypatch: Any
) -> None:
    """Its parameter has another shape than what was stored of all ranks, and was taken for a resized one; or it was
    another part, and was taken for the same.

    now: its first row, how many it has, and how many there are. A large part is stored as several blocks.
    """

    def made(name: str, begin: int, count: int, whole: int) -> tuple[Any, State]:
        local = nn.Parameter(torch.ones(count, 2))
        rest = [(0, begin), (begin + count, whole)]
        pieces = [asyncckpt.Piece(torch.ones(end - row, 2), (row, 0)) for row, end in rest if row < end]
        optimizer = kind([("w", local)], lr=0.25)
        local.grad = torch.ones_like(local)
        optimizer.step()
        own = asyncckpt.Piece(local.detach(), (begin, 0))
        return optimizer, {name: asyncckpt.Sharded((whole, 2), local.dtype, (own, *pieces)), "o": optimizer}

    monkeypatch.setattr(image, "BLOCK_BYTES_MAX", block_bytes)
    optimizer, state = made("m", 0, 2, 4)
    kept(tmp_path, state)
    wanted = str(optimizer.state_dict())
    name = "n" if "rename" in call else "m"
    optimizer, state = made(name, *now)
    optimizer.state.clear()
    is_same = now[:2] == (0, 2)
    if now[2] != 4:
        call = {**call, "resize": [name]}
    is_strict = not call.keys() & ({"strict"} if kind is OwnLoad else {"strict", "rename", "resize"})
    if is_strict and not is_same:
        with pytest.raises(IncompatibleError, match="nothing was changed: 'o' has a parameter 0 that is of another"):
            restore(tmp_path, state, **call)
        return
    report, _ = restore(tmp_path, state, **call)
    if is_same:
        assert (list(report.missing), str(optimizer.state_dict())) == ([], wanted)
    else:
        assert (list(report.missing), [*filter(None, optimizer.state.values())]) == (
            ["o" if kind is OwnLoad else f"o of {name}"],
            [],
        )


class NotOfTorch(torch.optim.Optimizer):
    """Has the options and state of SGD, and is none of torch's."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, torch.optim.SGD([torch.zeros(1)], lr=lr).defaults)

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum_buffer"] = parameter.grad.clone()


@pytest.mark.parametrize("inside", [0, 1])
@pytest.mark.parametrize(("was", "now"), [(NotOfTorch, torch.optim.SGD), (torch.optim.SGD, NotOfTorch)])
def test_one_that_is_not_torchs_is_another_one(tmp_path: Path, was: Any, now: Any, inside: int) -> None:
    kept(tmp_path, stepped(was, inside=inside)[1])
    optimizer, state = stepped(now, inside=inside)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(IncompatibleError, match=rf"is of class '{now.__name__}', the checkpoint has the state of"):
        restore(tmp_path, state)
    report, _ = restore(tmp_path, state, strict=False)
    assert report.missing == ("t.o" if inside else "t",)
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("state", ["absent", None, [], "text", torch.zeros(2)])
@pytest.mark.parametrize("strict", [True, False])
def test_a_state_of_no_optimizer_is_refused_before_anything_is_filled(tmp_path: Path, state: Any, strict: bool) -> None:
    optimizer, now = stepped(torch.optim.Adam, inside=0)
    stored = optimizer.state_dict() | {"state": state}
    if isinstance(state, str) and state == "absent":
        del stored["state"]
    kept(tmp_path, {"m": now["m"], "t": stored})
    optimizer, now = stepped(torch.optim.Adam, inside=0)
    before = now["m"]["a"].weight.clone()
    if strict:
        with pytest.raises(IncompatibleError, match="nothing was changed"):
            restore(tmp_path, now)
        assert torch.equal(now["m"]["a"].weight, before)
    else:
        report, _ = restore(tmp_path, now, strict=False)
        assert "t" in report.missing
