"""Save tensors and load them into new ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

import asyncckpt
from tests.worlds.bits import raw_of

Save = Callable[..., asyncckpt.SaveResult]


def loaded(root: Path, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint, in new contiguous targets."""
    target = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in like.items()}
    asyncckpt.Loader(root, tensors=target).load()
    return target


def assert_round_trip(save: Save, root: Path, **state: torch.Tensor) -> None:
    wanted = {name: raw_of(value) for name, value in state.items()}
    save(state)
    assert {name: raw_of(value) for name, value in loaded(root, state).items()} == wanted
