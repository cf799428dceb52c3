"""Writes that torch does not count, so a save with `optimizers=` cannot see them: the page on saving names each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "saving.md").read_text(encoding="utf-8")


@torch.library.custom_op("asyncckpt_tests::write", mutates_args=())
def write_undeclared(tensor: torch.Tensor) -> torch.Tensor:
    tensor.numpy()[...] = 7
    return tensor.clone()


def kron(tensor: torch.Tensor) -> None:
    torch.kron(torch.full(tensor.shape, 7.0), torch.ones(1, 1), out=tensor)


def batch_norm(tensor: torch.Tensor) -> None:
    flat = tensor.view(-1)
    torch.nn.functional.batch_norm(torch.rand(8, len(flat)), flat, torch.ones(len(flat)), training=True, momentum=1.0)


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "`apply_`": lambda tensor: tensor.apply_(lambda _: 7.0),
    "`map_`": lambda tensor: tensor.map_(torch.ones_like(tensor), lambda a, b: a + b + 7),  # type: ignore[arg-type]
    "`map2_`": lambda tensor: tensor.map2_(tensor.clone(), tensor.clone(), lambda a, b, c: a + b + c + 7),  # type: ignore[attr-defined]
    "`torch.kron(out=)`": kron,
    "`F.batch_norm`": batch_norm,
    "`torch.library.custom_op`": write_undeclared,
}


@pytest.mark.parametrize("named", WRITES)
def test_a_write_that_is_not_counted_is_named_on_the_page(named: str) -> None:
    tensor = torch.zeros(8, 8)
    before = tensor._version
    WRITES[named](tensor)
    assert tensor.count_nonzero() > 0
    assert tensor._version == before, "torch counts it now: take it from the page"
    assert named in PAGE
