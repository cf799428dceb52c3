"""Tensors, and states that hold them, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch


def raw_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of the elements in their order, however and wherever they lie."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    with contextlib.suppress(NotImplementedError):  # Older torch has types that it cannot copy.
        plain = plain.clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def bits(value: Any) -> Any:
    """Return tensors as (dtype, shape, bytes), containers as they are."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), raw_of(value)
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, (list, tuple)) else value


def taken(tensor: torch.Tensor, box: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return a part of a tensor, from where to where of each dimension."""
    return tensor[tuple(slice(low, high) for low, high in box)]
