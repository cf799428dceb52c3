"""A small state on the host with `optimizers=`, saved beside its training."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from tests.devices.training import differing
from tests.steps.gate import StepGate

Tensors = dict[str, torch.Tensor]


class Stepped:
    """Two parameters with an optimizer each, a buffer, and a Saver of all that."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.weight = torch.nn.Parameter(torch.arange(300.0))
        self.bias = torch.nn.Parameter(torch.arange(90.0))
        self.buffer = torch.arange(5.0)
        self.optimizers = [
            torch.optim.Adam([self.weight], lr=0.5, foreach=False),
            torch.optim.SGD([self.bias], lr=0.5, momentum=0.9),
        ]
        self.step()
        self.saver = asyncckpt.Saver(
            path=path,
            tensors=self.state,
            device=asyncckpt.DeviceOptions(optimizers=self.optimizers),
            on_busy="queue",
            **options,
        )
        self.saver.save_async(0).result(30)

    @property
    def state(self) -> dict[str, Any]:
        return {
            "weight": self.weight,
            "bias": self.bias,
            "buffer": self.buffer,
            "adam": self.optimizers[0],
            "sgd": self.optimizers[1],
        }

    def values(self) -> Tensors:
        named = {"weight": self.weight, "bias": self.bias, "buffer": self.buffer}
        named |= {f"adam.{name}": value for name, value in self.optimizers[0].state[self.weight].items()}
        named["sgd.momentum"] = self.optimizers[1].state[self.bias]["momentum_buffer"]
        return {name: tensor.detach().clone() for name, tensor in named.items()}

    def loaded(self, step: int) -> Tensors:
        tree = asyncckpt.load(self.path, step=step)
        found = {name: tree[name].detach() for name in ("weight", "bias", "buffer")}
        found |= {f"adam.{name}": value for name, value in tree["adam"]["state"][0].items()}
        found["sgd.momentum"] = tree["sgd"]["state"][0]["momentum_buffer"]
        return found

    def set_gradients(self) -> None:
        for parameter in (self.weight, self.bias):
            parameter.grad = torch.ones_like(parameter)

    def step(self) -> None:
        self.set_gradients()
        for optimizer in self.optimizers:
            optimizer.step()

    def check(self, future: asyncckpt.SaveFuture, step: int, values: Tensors) -> asyncckpt.SaveResult:
        result = future.result(30)
        assert differing(self.loaded(step), values) == []
        return result


def load_optimizer(world: Stepped) -> None:
    content = copy.deepcopy(world.optimizers[0].state_dict())
    content["state"][0]["exp_avg"].zero_()
    world.optimizers[0].load_state_dict(content)


def check_swapped(
    path: Path, gate: StepGate, state: dict[str, Any], parameter: Any, other: Any, *, writes: bool, name: str
) -> None:
    """Swap a parameter with another one behind the call of a save: a write to its memory refuses that by name."""
    device = asyncckpt.DeviceOptions(optimizers=[torch.optim.SGD([parameter], lr=1.0)])
    with asyncckpt.Saver(path=path, tensors=state, device=device) as saver:
        with gate.held():
            future = saver.save_async(1)
            torch.utils.swap_tensors(parameter, other)
            if writes:
                with torch.no_grad():
                    other.mul_(2)
        if writes:
            with pytest.raises(asyncckpt.UsageError, match=f"'{re.escape(name)}' was changed between save_async"):
                future.result(60)
        else:
            future.result(60)
