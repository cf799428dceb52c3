"""Accelerate itself with ours: a resumed loop is bit-equal, with one process and with two."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import asyncckpt
from asyncckpt.integrations.accelerate import checkpointer
from tests.integrations.jobs import differences, run_job


def test_a_run_killed_and_terminated_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    whole, _ = run_job("accelerate_job", tmp_path / "whole")
    parts = [run_job("accelerate_job", tmp_path / "parts", "SIGKILL", 7, expected=[-signal.SIGKILL])[0]]
    shutil.copytree(tmp_path / "parts", tmp_path / "planted")
    parts += [run_job("accelerate_job", tmp_path / "parts", "SIGTERM", 11, expected=[143])[0]]
    last, printed = run_job("accelerate_job", tmp_path / "parts")
    assert "resumes 12" in printed
    assert differences(whole, *parts, last) == {}
    wrong, _ = run_job("accelerate_job", tmp_path / "planted", environment={"PLANT": "random numbers"})
    assert any(whole[key] != values for key, values in wrong.items())


def test_two_processes_resume_together(tmp_path: Path) -> None:
    whole, _ = run_job("accelerate_job", tmp_path / "whole", ranks=2)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    first = asyncckpt.list_steps(tmp_path / "parts")[0]  # Some that were due may have been skipped.
    asyncckpt.checkpoints.remove_after(tmp_path / "parts", first)
    last, printed = run_job("accelerate_job", tmp_path / "parts", ranks=2)
    assert f"resumes {first + 1}" in printed
    assert {key: values for key, values in last.items() if whole[key] != values} == {}
    assert min((step for _, step in last), default=first + 1) == first + 1


def test_several_models_and_what_is_registered(tmp_path: Path) -> None:
    class Counter:
        value = 0

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    accelerator = Accelerator(cpu=True)
    with pytest.raises(asyncckpt.UsageError, match="nothing is prepared"):
        checkpointer(accelerator, tmp_path, every=1)
    first, second = accelerator.prepare(torch.nn.Linear(2, 1), torch.nn.Linear(3, 1))
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    with pytest.raises(asyncckpt.UsageError, match="names of the state"):
        checkpointer(accelerator, tmp_path, every=1, model_0=first)
    with checkpointer(accelerator, tmp_path, every=1, keep=2) as ckpt:
        counter.value = 3
        ckpt.save_now(1)
        weight = second.weight.detach().clone()
        with torch.no_grad():
            second.weight.zero_()
        counter.value = 0
        assert ckpt.restore() == 2
    assert torch.equal(second.weight, weight)
    assert counter.value == 3


def test_what_is_prepared_later_is_not_left_out_silently(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 1))
    with checkpointer(accelerator, tmp_path, every=1) as ckpt:
        ckpt.save_now(0)
        late = accelerator.prepare(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))
        for call in (ckpt.restore, lambda: ckpt.step(1), lambda: ckpt.save_now(1)):
            with pytest.raises(asyncckpt.UsageError, match=r"prepared or registered after.*'optimizers': 1"):
                call()
        accelerator._optimizers.remove(late)
        ckpt.step(1)
    assert asyncckpt.list_steps(tmp_path) == [0, 1]


def test_the_position_within_accumulated_gradients_is_saved(tmp_path: Path) -> None:
    def prepared() -> tuple[Accelerator, Any]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        return accelerator, accelerator.prepare(torch.nn.Linear(2, 1))

    accelerator, model = prepared()
    with checkpointer(accelerator, tmp_path, every=1) as ckpt:
        for _ in range(4):
            with accelerator.accumulate(model):
                pass
        ckpt.save_now(0)
    resumed, _ = prepared()
    with checkpointer(resumed, tmp_path, every=1) as ckpt:
        assert ckpt.restore() == 1
    assert resumed.step == accelerator.step == 4
