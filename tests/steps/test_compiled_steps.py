"""Steps that torch compiles wait as others do: the wait itself is not compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import asyncckpt
from tests.steps import gate as gates

pytestmark = [pytest.mark.any_core, pytest.mark.slow]


def test_a_compiled_step_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = gates.install(monkeypatch)
    weight = torch.nn.Parameter(torch.arange(3000.0))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones_like(weight)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    device = asyncckpt.DeviceOptions(optimizers=[optimizer])
    counters.clear()
    with asyncckpt.Saver(path=tmp_path, tensors={"w": weight}, on_busy="queue", device=device) as saver:
        futures, before = [], []
        for number in range(12):
            before.append(weight.detach().clone())
            futures.append(saver.save_async(number))
            step()
        for future in futures:
            future.result(30)
    assert "step" in gate.log
    assert all(torch.equal(asyncckpt.load(tmp_path, step=n)["w"].detach(), value) for n, value in enumerate(before))
    assert not [reason for reason in counters["graph_break"] if "getpid" in reason]
