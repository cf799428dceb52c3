"""A loop in torchtitan's shape under FSDP2 resumes as it was, and saves when it is told."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.integrations.torchtitan import CheckpointManager
from tests.integrations.jobs import run_job

# What torchtitan's trainer calls, as in its components/checkpointer/base.py.
METHODS = {
    "load": ["step"],
    "save": ["curr_step", "last_step"],
    "maybe_wait_for_staging": [],
    "maybe_wait_for_saving": [],
    "close": [],
}


def test_a_loop_on_two_ranks_resumes_as_it_was(tmp_path: Path) -> None:
    whole, printed = run_job("torchtitan_job", tmp_path / "whole", 12, ranks=2)
    assert "loaded False" in printed
    run_job("torchtitan_job", tmp_path / "parts", 6, ranks=2)
    assert asyncckpt.list_steps(tmp_path / "parts") == [4, 6]
    rest, printed = run_job("torchtitan_job", tmp_path / "parts", 12, ranks=2)
    assert "loaded True" in printed
    assert rest == {key: values for key, values in whole.items() if key[1] > 6}


def test_its_methods_are_those_of_torchtitan() -> None:
    for name, parameters in METHODS.items():
        found = inspect.signature(getattr(CheckpointManager, name)).parameters
        assert [parameter for parameter in found if parameter != "self"] == parameters


def test_when_it_saves_and_what_it_goes_back_to(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = CheckpointManager(
        None, model, sgd, None, {}, folder=tmp_path, interval=3, keep_latest_k=0, enable_first_step_checkpoint=True
    )
    assert [step for step in range(1, 9) if manager.save(step, last_step=step == 8)] == [1, 3, 6, 8]
    manager.maybe_wait_for_saving()
    assert manager.load(3)
    manager.close()
    assert asyncckpt.list_steps(tmp_path) == [1, 3]
    reading = CheckpointManager(None, model, sgd, None, {}, folder=tmp_path, load_only=True)
    assert reading.load()
    assert not reading.save(4, last_step=True)
    reading.close()
    assert asyncckpt.list_steps(tmp_path) == [1, 3]
    with pytest.raises(asyncckpt.UsageError, match="interval"):
        CheckpointManager(None, model, sgd, None, {}, folder=tmp_path / "other", interval=0)


def test_load_only_removes_nothing(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = CheckpointManager(None, model, sgd, None, {}, folder=tmp_path, interval=1)
    for step in range(1, 6):
        torch.nn.init.constant_(model.weight, step)
        manager.save(step)
    manager.close()
    reading = CheckpointManager(None, model, sgd, None, {}, folder=tmp_path, load_only=True)
    assert reading.load(2)
    assert model.weight.tolist() == [[2.0, 2.0]]
    with pytest.raises(asyncckpt.CheckpointError, match="9"):
        reading.load(9)
    reading.close()
    assert asyncckpt.list_steps(tmp_path) == [1, 2, 3, 4, 5]


class _Counting(torch.nn.Module):
    """Has a buffer that is another tensor behind every call."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, torch.nn.Linear(1, 1))
        self._name = f"{name}_seen"
        self.register_buffer(self._name, torch.zeros(1))

    def forward(self) -> None:
        setattr(self, self._name, self.seen + 1)

    @property
    def seen(self) -> torch.Tensor:
        found: torch.Tensor = getattr(self, self._name)
        return found


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_buffers_that_are_replaced_are_saved_and_restored(tmp_path: Path, names: list[str]) -> None:
    modules = [_Counting(name) for name in names]
    sgd = torch.optim.SGD([value for module in modules for value in module.parameters()], lr=0.1)
    manager = CheckpointManager(None, modules, sgd, None, {}, folder=tmp_path, interval=1)
    for step in range(1, 4):
        for module in modules:
            module()
        manager.save(step)
    manager.close()
    saved = asyncckpt.load(tmp_path)["model"]
    assert {name: saved[f"{name}_seen"].item() for name in names} == dict.fromkeys(names, 3.0)
    weights = [module.state_dict()[f"{name}.weight"].item() for module, name in zip(modules, names, strict=True)]
    modules = [_Counting(name) for name in names]
    sgd = torch.optim.SGD([value for module in modules for value in module.parameters()], lr=0.1)
    manager = CheckpointManager(None, modules, sgd, None, {}, folder=tmp_path)
    for module in modules:
        module()
    assert manager.load()
    manager.close()
    assert [module.seen.item() for module in modules] == [3.0] * len(names)
    loaded = [module.state_dict()[f"{name}.weight"].item() for module, name in zip(modules, names, strict=True)]
    assert loaded == weights


@pytest.mark.parametrize("load_only", [False, True])
def test_a_changed_model_is_loaded_as_it_says(tmp_path: Path, load_only: bool) -> None:
    model = torch.nn.Linear(2, 1)
    manager = CheckpointManager(None, model, torch.optim.SGD(model.parameters(), lr=0.1), None, {}, folder=tmp_path)
    torch.nn.init.constant_(model.weight, 7.0)
    manager.save(1, last_step=True)
    manager.close()
    now = torch.nn.Linear(3, 1)
    sgd = torch.optim.SGD(now.parameters(), lr=0.1)
    how = {"resize": ["model"]}
    reading = CheckpointManager(None, now, sgd, None, {}, folder=tmp_path, load_only=load_only, restoring=how)
    last = now.weight[0, 2].item()
    assert reading.load(1)
    assert now.weight.tolist() == [[7.0, 7.0, last]]
    reading.close()
