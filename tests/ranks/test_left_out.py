"""Ranks that write only a part of what they hold: write filters on spread tensors, a rank that has nothing to write."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.pipeline.filters import identity
from tests.ranks import left_out_ranks
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


def check_whole(path: Path, step: int) -> None:
    found = asyncckpt.load(path, step=step)
    assert found.keys() == {f"w{n}" for n in range(6)}
    assert all(torch.equal(found[f"w{n}"], whole() + n) for n in range(6))


def test_one_group_of_a_mesh_saves_all_that_it_holds(tmp_path: Path) -> None:
    """Whoever is the writer among all ranks of the mesh may not be there."""
    assert run(left_out_ranks.one_group_of_a_mesh, 4, tmp_path) == [0] * 4
    places = [f"{layout}-{number}" for layout in ("all", "rows") for number in range(2)]
    for place in (*places, *(f"alone-{rank}" for rank in range(4))):
        check_whole(tmp_path / place, 2)


def test_as_many_ranks_as_a_mesh_has_save_all_that_they_hold(tmp_path: Path) -> None:
    """They are others than those of the mesh, where its writer may be."""
    assert run(left_out_ranks.as_many_ranks_as_a_mesh_has, 4, tmp_path) == [0] * 4
    for place in ("one", "two"):
        for step in range(3):
            check_whole(tmp_path / place, step)


def test_who_writes_a_box_is_asked_again_where_its_size_has_changed(tmp_path: Path) -> None:
    assert run(left_out_ranks.placed_anew, 4, tmp_path) == [0] * 4
    assert all(torch.equal(asyncckpt.load(tmp_path / "saved", step=step)["w"], whole() + step) for step in range(4))


@pytest.mark.parametrize("filter_func", [identity, left_out_ranks.cast], ids=["all", "filtered"])
@pytest.mark.parametrize("leaf", ["says_that_another_rank_writes", "holds_nothing", "one_rank_holds_a_part"])
def test_a_tensor_that_no_rank_has_written_is_not_left_out_without_a_word(
    tmp_path: Path, leaf: str, filter_func: Any
) -> None:
    job = partial(left_out_ranks.written_by_nobody, getattr(left_out_ranks, leaf), filter_func)
    assert run(job, 2, tmp_path) == [0, 0]
    assert asyncckpt.list_steps(tmp_path / "checkpoints") == []


def test_a_tensor_that_no_rank_in_turn_has_written_is_not_left_out_without_a_word(tmp_path: Path) -> None:
    in_turn = asyncckpt.RankOptions(in_turn=True)
    tensors = [{"w": left_out_ranks.holds_nothing(rank), "other": torch.ones(3)} for rank in range(2)]
    with (
        asyncckpt.Saver(0, 2, path=tmp_path / "checkpoints", tensors=tensors[0], ranks=in_turn) as first,
        asyncckpt.Saver(1, 2, path=tmp_path / "checkpoints", tensors=tensors[1], ranks=in_turn) as second,
    ):
        first.save(1)
        with pytest.raises(asyncckpt.ConflictError, match="no rank has written tensor 'w' of step 1"):
            second.save(1)
    assert asyncckpt.list_steps(tmp_path / "checkpoints") == []
