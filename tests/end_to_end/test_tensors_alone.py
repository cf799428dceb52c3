"""Tensors without names beside them: known by their own name, else by their position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt


class Named(torch.Tensor):
    """A tensor with a name; those of torch have none, and take none."""

    name: Any = None


def named(name: Any, fill: float) -> torch.Tensor:
    tensor = torch.full((3,), fill).as_subclass(Named)
    tensor.name = name
    return tensor


def test_a_list_of_tensors_is_named_by_position(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "d", [torch.ones(2), torch.arange(3), np.full(4, 2.0)])
    assert list(asyncckpt.load(tmp_path / "d")) == ["0", "1", "2"]
    targets = [torch.zeros(2), torch.zeros(3, dtype=torch.int64), np.zeros(4)]
    report = asyncckpt.Loader(tmp_path / "d", tensors=iter(targets)).load()
    assert [list(target) for target in targets] == [[1, 1], [0, 1, 2], [2, 2, 2, 2]]
    assert list(report.loaded) == ["0", "1", "2"]


def test_the_order_of_named_tensors_does_not_matter(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path / "d", tensors=[named("a", 1.0), torch.ones(1), named("b", 2.0)]) as saver:
        saver.save(1)
    assert list(asyncckpt.load(tmp_path / "d")) == ["a", "1", "b"]
    b, a = named("b", 0.0), named("a", 0.0)
    asyncckpt.Loader(tmp_path / "d", tensors=(b, a)).load()
    assert (a.tolist(), b.tolist()) == ([1] * 3, [2] * 3)


@pytest.mark.parametrize("name", [None, "", 5])
def test_what_is_no_text_is_no_name(tmp_path: Path, name: Any) -> None:
    asyncckpt.save(tmp_path / "d", [named(name, 1.0)])
    assert list(asyncckpt.load(tmp_path / "d")) == ["0"]


def test_parameters_and_pairs_beside_tensors(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    asyncckpt.save(tmp_path / "d", [*model.parameters(), ("epoch", 3)])
    report = asyncckpt.Loader(tmp_path / "d", tensors=other.parameters()).load()
    assert torch.equal(other.weight, model.weight)
    assert report.values == {"epoch": 3}


@pytest.mark.parametrize(
    "tensors", [[named("a", 1.0), named("a", 2.0)], [torch.ones(1), ("0", 1)], [("1", 0), torch.ones(1)]], ids=range(3)
)
def test_one_name_for_two_is_refused(tmp_path: Path, tensors: Any) -> None:
    with pytest.raises(asyncckpt.UsageError, match="names an entry twice"):
        asyncckpt.Saver(path=tmp_path, tensors=tensors)
    with pytest.raises(asyncckpt.UsageError, match="names an entry twice"):
        asyncckpt.Loader(tmp_path, tensors=tensors)
