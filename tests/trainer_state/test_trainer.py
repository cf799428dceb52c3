"""Step counter and the bundle of everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import asyncckpt
from asyncckpt.trainer_state import DataPosition, ResumableSampler, RngState, StepCounter, TrainerState
from tests.worlds.objects import Stateful

pytestmark = pytest.mark.any_core


def trainer(**more: Any) -> TrainerState:
    loader = DataLoader(range(8), batch_size=2, sampler=ResumableSampler(8))
    return TrainerState(StepCounter(), RngState(), DataPosition(loader), **more)


def test_steps_are_counted() -> None:
    step = StepCounter(4)
    assert (step.advance(), int(step), range(9)[step], repr(step)) == (5, 5, 5, "StepCounter(5)")
    fresh = StepCounter()
    fresh.load_state_dict(step.state_dict())
    assert fresh.value == 5


@pytest.mark.parametrize("value", [-1, True, 1.0, None])
def test_a_step_is_a_number(value: Any) -> None:
    with pytest.raises(asyncckpt.UsageError, match="first step must be"):
        StepCounter(value)
    with pytest.raises(asyncckpt.IncompatibleError, match="holds no step"):
        StepCounter().load_state_dict({"step": value})


def test_everything_comes_back(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([weight], lr=1.0)
    saved = trainer(scheduler=torch.optim.lr_scheduler.StepLR(sgd, 2, 0.5))
    assert saved.data is not None
    next(iter(saved.data))
    saved.step.advance()
    with asyncckpt.Saver(path=tmp_path, tensors={"trainer": saved}) as saver:
        saver.save(1)
    expected = torch.rand(4)
    fresh = trainer(scheduler=torch.optim.lr_scheduler.StepLR(sgd, 9, 0.1))
    asyncckpt.Loader(tmp_path, tensors={"trainer": fresh}).load()
    assert torch.equal(torch.rand(4), expected)
    assert fresh.data is not None
    assert (int(fresh.step), fresh.data.samples_consumed) == (1, 2)


def test_random_numbers_are_set_last() -> None:
    saved = trainer(zz=Stateful({"x": 1}, loading=lambda: torch.rand(1)))
    state = saved.state_dict()
    expected = torch.rand(1)
    saved.load_state_dict(state)
    assert torch.equal(torch.rand(1), expected)


def test_other_parts_change_nothing() -> None:
    state = trainer(ema=StepCounter(3)).state_dict()
    target = trainer()
    state["step"]["step"] = 9
    with pytest.raises(
        asyncckpt.IncompatibleError, match=r"has other parts, found \['data', 'ema'.*expected \['data', 'rng'"
    ):
        target.load_state_dict(state)
    assert int(target.step) == 0


def test_parts_have_a_state() -> None:
    with pytest.raises(asyncckpt.UsageError, match="part 'lr' of the trainer's state has no state_dict"):
        TrainerState(lr=0.1)
    assert sorted(TrainerState().state_dict()) == ["rng", "step"]
