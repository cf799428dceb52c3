"""Ranks that write only a part of what they hold: write filters on spread tensors, a rank that has nothing to write."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import asyncckpt
from tests.ranks.left_out_ranks import SHAPE, filtered, one_piece_less, only_replicated_tables, whole
from tests.ranks.test_jobs import run

pytestmark = [pytest.mark.any_core, pytest.mark.timeout(200)]


@pytest.mark.parametrize("how", ["drop", "rename", "cast"])
@pytest.mark.parametrize("layout", ["rows", "columns", "pieces"])
def test_write_filters_take_tensors_that_are_spread_over_ranks(tmp_path: Path, layout: str, how: str) -> None:
    assert run(partial(filtered, layout, how), 2, tmp_path) == [0, 0]
    dtype = torch.bfloat16 if how == "cast" else torch.float32
    for step in (1, 2):
        assert asyncckpt.verify(tmp_path / "checkpoints", step).strays == ()
        blocks = asyncckpt.describe(tmp_path / "checkpoints", step).blocks
        names = {"drop": {"w"}, "rename": {"v", "other"}, "cast": {"w", "other"}}[how]
        assert {block.name for block in blocks} == names
        found = torch.zeros(SHAPE, dtype=dtype)
        target = {"v" if how == "rename" else "w": found}
        asyncckpt.Loader(tmp_path / "checkpoints", tensors=target, strict=False, step=step).load()
        assert torch.equal(found, whole().to(dtype))


def test_boxes_of_a_tensor_stay_together(tmp_path: Path) -> None:
    assert run(one_piece_less, 2, tmp_path) == [0, 0]
    assert asyncckpt.list_steps(tmp_path / "checkpoints") == []


def test_a_rank_that_has_nothing_to_write(tmp_path: Path) -> None:
    assert run(only_replicated_tables, 2, tmp_path) == [0, 0]
    assert asyncckpt.list_steps(tmp_path / "checkpoints") == [1, 2, 3]
    torch.manual_seed(0)
    expected = torch.nn.Embedding(10, 4).weight
    for step in (1, 2, 3):
        assert asyncckpt.verify(tmp_path / "checkpoints", step).strays == ()
        modules = torch.nn.ModuleDict({"e": torch.nn.Embedding(10, 4)})
        asyncckpt.Loader(tmp_path / "checkpoints", hashtables=modules, step=step).load()
        assert torch.equal(modules["e"].weight, expected)
