"""With `optimizers=` forward and backward go on beside the copies; the step waits for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asyncckpt
from tests.gpu.device import DEVICE, keep_busy, synchronize
from tests.gpu.state import differences

WAIT_S = 120


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(1000, 900), torch.nn.ReLU(), torch.nn.Linear(900, 1000)).to(DEVICE)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def backward(model: torch.nn.Module, seed: int) -> None:
    batch = torch.randn(64, 1000, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    model(batch).square().mean().backward()


def copied(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies that are queued behind what is queued now."""
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"{index}.{name}": value.clone() for name, value in state.items()}
    return found


@pytest.mark.parametrize("scratch", [0, 1 << 30])
@pytest.mark.parametrize("is_named", [False, True])
def test_steps_wait_for_the_copies(tmp_path: Path, scratch: int, is_named: bool) -> None:
    model, optimizer = make()
    expected = []
    with asyncckpt.Saver(
        path=tmp_path,
        tensors={"model": model, "optimizer": optimizer},
        device=asyncckpt.DeviceOptions(scratch_bytes=scratch, optimizers=[optimizer] if is_named else []),
        on_busy="queue",
        durability="none",
    ) as saver:
        futures = []
        for step in range(4):
            keep_busy()
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            expected.append(copied(model, optimizer))
            futures.append(saver.save_async(step))
        backward(model, 9)
        optimizer.step()
        for future in futures:
            future.result(WAIT_S)
    synchronize()
    for step, copy in enumerate(expected):
        other, its_optimizer = make()
        asyncckpt.Loader(tmp_path, tensors={"model": other, "optimizer": its_optimizer}, step=step).load()
        assert differences(copied(other, its_optimizer), copy) == []
