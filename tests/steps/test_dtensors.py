"""Parameters that are DTensors: what is written to them otherwise is seen, as of plain ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from tests.steps.gate import StepGate
from tests.steps.world import check_swapped

pytestmark = pytest.mark.any_core


def module_of(mesh: Any, kind: str) -> torch.nn.Module:
    module = torch.nn.Linear(40, 30, bias=False)
    if kind == "fsdp":
        fully_shard = pytest.importorskip("torch.distributed.fsdp", reason="this torch has no FSDP2").fully_shard
        fully_shard(module, mesh=mesh)
    else:
        from torch.distributed.tensor import Replicate, distribute_tensor

        module.weight = torch.nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Replicate()]))
    return module


def load(module: torch.nn.Module) -> None:
    module.load_state_dict({name: value.detach().clone() * 2 for name, value in module.state_dict().items()})


def multiply(module: torch.nn.Module) -> None:
    with torch.no_grad():
        next(module.parameters()).mul_(2)


def multiply_what_is_within(module: torch.nn.Module) -> None:
    with torch.no_grad():
        next(module.parameters()).to_local().mul_(2)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["plain", "fsdp"])
@pytest.mark.parametrize("act", [load, multiply, multiply_what_is_within])
def test_what_is_changed_otherwise_is_refused_by_name(
    tmp_path: Path, mesh: Any, gate: StepGate, kind: str, act: Callable[[torch.nn.Module], None]
) -> None:
    module = module_of(mesh, kind)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    device = asyncckpt.DeviceOptions(optimizers=[optimizer])
    with asyncckpt.Saver(path=tmp_path, tensors={"module": module}, device=device) as saver:
        with gate.held():
            future = saver.save_async(1)
            act(module)
        with pytest.raises(asyncckpt.UsageError, match=r"'module\.weight' was changed between save_async"):
            future.result(60)


@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_a_step_waits(tmp_path: Path, mesh: Any, gate: StepGate, kind: str) -> None:
    module = module_of(mesh, kind)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    parameter: Any = next(module.parameters())
    values = parameter.to_local().detach().clone()
    device = asyncckpt.DeviceOptions(optimizers=[optimizer])
    with asyncckpt.Saver(path=tmp_path, tensors={"module": module}, device=device) as saver:
        future = saver.save_async(1)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        future.result(60)
    assert not torch.equal(parameter.to_local().detach(), values)
    assert torch.equal(asyncckpt.load(tmp_path, step=1)["module"]["weight"].detach(), values)


@pytest.mark.parametrize("kind", ["plain", "fsdp"])
@pytest.mark.parametrize("writes", [False, True])
def test_one_that_is_swapped_is_watched(tmp_path: Path, mesh: Any, gate: StepGate, kind: str, writes: bool) -> None:
    """What counts its writes goes with its memory to the other one."""
    module, other = module_of(mesh, kind), torch.nn.Parameter(next(module_of(mesh, kind).parameters()).detach())
    parameter: Any = next(module.parameters())
    with torch.no_grad():
        parameter.add_(1)
        while writes and other._version < parameter._version:
            other.zero_()
    values = parameter.to_local().detach().clone()
    check_swapped(tmp_path, gate, {"module": module}, parameter, other, writes=writes, name="module.weight")
    assert writes or torch.equal(asyncckpt.load(tmp_path, step=1)["module"]["weight"].detach(), values)
