"""A small model under FSDP2 with AdamW, trained a few steps: the same on every number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

STEPS = 3


class UnevenNet(torch.nn.Module):
    """Sizes that 2 and 4 do not divide, a buffer that is changed in forward, a scalar, tied weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(7, 13)
        self.second = torch.nn.Linear(13, 3, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.norm = torch.nn.BatchNorm1d(13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)).relu()) * self.scale


def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, spread over the ranks that are there."""
    model = UnevenNet(seed)
    if dist.is_initialized():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(5, 7, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As the state_dict helpers of DCP give it."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state}


def put_back(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def blank(state: Any) -> Any:
    """Return the same structure with other contents."""
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return torch.zeros(state.shape, dtype=state.dtype) if isinstance(state, torch.Tensor) else "blank"


def image_of(state: Any, name: str = "") -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor in full, and every number, by dotted name. All ranks have to call it."""
    if isinstance(state, dict):
        return {k: v for key, child in state.items() for k, v in image_of(child, f"{name}.{key}").items()}
    if isinstance(state, list):
        return {k: v for key, child in enumerate(state) for k, v in image_of(child, f"{name}.{key}").items()}
    if isinstance(state, torch.Tensor):
        full = state.full_tensor() if hasattr(state, "full_tensor") else state
        raw = full.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).flatten()
        bytes_of = raw.view(torch.uint8).numpy().copy() if raw.numel() else np.empty(0, dtype=np.uint8)
        return {name: bytes_of, f"{name}:shape": np.array(full.shape), f"{name}:dtype": np.array(str(full.dtype))}
    return {name: np.array(repr(state))}


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names of what is not equal, bit for bit."""
    names = found.keys() ^ expected.keys()
    both = found.keys() & expected.keys()
    return sorted(names | {name for name in both if found[name].tobytes() != expected[name].tobytes()})
