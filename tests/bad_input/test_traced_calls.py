"""Case 85: tensors of transforms of torch.func, and calls in functions that torch traces or transforms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import asyncckpt

UsageError, UnsupportedError = asyncckpt.UsageError, asyncckpt.UnsupportedError


@pytest.mark.parametrize("planned", [False, True])
def test_case_085_tensor_of_a_transform_has_no_data(tmp_path: Path, planned: bool) -> None:
    """Neither within it nor behind it."""
    state = {"fine": torch.ones(3), "odd": torch.ones(4, 3)}

    def loss(odd: torch.Tensor) -> torch.Tensor:
        state["odd"] = odd
        refused(1)
        return odd.sum()

    def refused(step: int) -> None:
        with pytest.raises(UnsupportedError, match=r"'odd' is one of a transform of torch\.func"):
            saver.save(step)

    with asyncckpt.Saver(path=tmp_path, tensors=state) as saver:
        if planned:
            saver.save(0)
        torch.func.vmap(loss)(torch.ones(2, 4, 3))
        refused(2)
    assert asyncckpt.list_steps(tmp_path) == ([0] if planned else [])


def with_fake_tensors(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], None]:
    def run(x: torch.Tensor) -> None:
        with FakeTensorMode():
            function(torch.ones(x.shape))

    return run


@pytest.mark.parametrize("way", [make_fx, torch.func.functionalize, torch.func.grad, with_fake_tensors])
def test_case_085_calls_in_a_function_that_is_traced(tmp_path: Path, way: Any) -> None:
    """There torch makes copies of the memory that it is given: what a save wrote to was gone."""
    state = {"x": torch.ones(3000), "turned": torch.ones(4, 3).t()}
    target = {"x": torch.zeros(3000)}
    calls: list[Callable[[], object]] = [
        lambda: saver.save_async(1),
        lambda: saver.save(1),
        lambda: asyncckpt.load(tmp_path),
        asyncckpt.Loader(tmp_path, tensors=target, strict=False).load,
    ]

    def function(x: torch.Tensor) -> torch.Tensor:
        for call in calls:
            with pytest.raises(UsageError, match="was called in a function that torch traces or transforms"):
                call()
        return x.sum()

    with asyncckpt.Saver(path=tmp_path, tensors=state) as saver:
        saver.save(0)
        way(function)(torch.ones(2))
        saver.save_async(1)
    assert asyncckpt.list_steps(tmp_path) == [0, 1]
    assert not target["x"].any()
