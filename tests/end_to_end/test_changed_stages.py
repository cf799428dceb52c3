"""Training goes on right where another part of a model is trained from now on, or two of its parts were one.

The oracle is arithmetic: each parameter has a moment of its own number (test_changed_optimizers.py), and each step is
counted once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import asyncckpt
from tests.end_to_end.test_changed_optimizers import FAST, State, layer, restore

KINDS = {name: getattr(torch.optim, name) for name in ("Adam", "Adagrad", "NAdam", "ASGD", "Rprop")}


def train(optimizer: torch.optim.Optimizer, steps_count: int = 2) -> None:
    for _ in range(steps_count):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def begin(path: Path, state: State) -> None:
    """Train the optimizer "o" of a state for two steps, and save all."""
    train(state["o"])
    with asyncckpt.Checkpointer(path, every=1, options=FAST, **state) as ckpt:
        ckpt.step(0)


# -- one state for two -------------------------------------------------------------------------------------------------


def twins(kind: Any, how: str, *, are_two: bool) -> State:
    m = nn.ModuleDict({"a": layer()} | ({"b": layer()} if are_two or how == "tied" else {}))
    if not are_two and how == "tied":
        m["b"].weight = m["a"].weight
    return {"m": m, "o": kind(m.named_parameters())}


def doubled(info: Any) -> Any:
    return {name: ({"m.a.weight": []} if name == "m.b.weight" else info[name]) for name in info}


@pytest.mark.parametrize("how", ["tied", "copied by a filter"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_parameters_that_get_one_state_count_their_own_steps(tmp_path: Path, kind: str, how: str) -> None:
    begin(tmp_path, twins(KINDS[kind], how, are_two=False))
    now = twins(KINDS[kind], how, are_two=True)
    restore(tmp_path, now, strict=False, **({} if how == "tied" else {"filter_func": doubled}))
    first, second = (now["o"].state[each.weight] for each in now["m"].values())
    for key, value in first.items():
        if isinstance(value, torch.Tensor):
            assert value.data_ptr() != second[key].data_ptr(), key
    train(now["o"])
    assert [float(each["step"]) for each in (first, second)] == [4.0, 4.0]
