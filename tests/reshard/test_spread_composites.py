"""DTensors over composites: as many ranks get theirs, others do if all had the same of what is not cut by rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from tests.ranks.processes import await_ranks, outputs, start_rank
from tests.reshard.spread_composites import codes
from tests.worlds.composites import OneScale

pytestmark = pytest.mark.any_core


def by_ranks(folder: Path, ranks_count: int, *words: str) -> list[list[Any]]:
    """Return what each rank has found, word by word."""
    of_ranks = [(rank, ranks_count, folder, *words) for rank in range(ranks_count)]
    module = "tests.reshard.spread_composites"
    ended = await_ranks([start_rank(module, one, folder) for one in of_ranks], 110)
    assert [rank.status for rank in ended] == [0] * ranks_count, outputs(ended)
    found = [json.loads((folder / f"found-{ranks_count}-{rank}.json").read_text()) for rank in range(ranks_count)]
    return [list(of_word) for of_word in zip(*found, strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spread")


@pytest.fixture(scope="module")
def two(folder: Path) -> dict[str, list[Any]]:
    saves = ("save:same", "own:own", "whole:whole", "momentum:trained")
    words = (*saves, "load:same", "load:own", "resume:trained", "partly:trained")
    return dict(zip(words, by_ranks(folder, 2, *words), strict=True))


@pytest.fixture(scope="module")
def three(folder: Path, two: dict[str, list[Any]]) -> dict[str, list[Any]]:
    words = ("load:same", "load:own", "load:whole", "resume:trained", "partly:trained")
    return dict(zip(words, by_ranks(folder, 3, *words), strict=True))


def rows_of(found: list[Any], key: str = "codes") -> list[Any]:
    return [row for one in found for row in one[key]]


@pytest.mark.parametrize("how", ["same", "own"])
def test_as_many_ranks_get_what_each_has_had(two: dict[str, list[Any]], how: str) -> None:
    saved = two["save:same" if how == "same" else "own:own"]
    assert two[f"load:{how}"] == saved
    assert rows_of(saved) == codes(1).tolist()
    assert [one["scale"] for one in saved] == ([2.0, 2.0] if how == "same" else [2.0, 3.0])


def test_another_number_of_ranks_cuts_the_rows_anew(three: dict[str, list[Any]]) -> None:
    assert rows_of(three["load:same"]) == codes(1).tolist()
    assert [one["scale"] for one in three["load:same"]] == [2.0] * 3


def test_what_each_rank_had_of_its_own_needs_as_many(three: dict[str, list[Any]], folder: Path) -> None:
    for told in three["load:own"]:
        assert "'w.scale' differs from rank to rank in the checkpoint: load it with 2 ranks" in told
        assert told.endswith("/ True")
    target = OneScale(codes(3), torch.tensor(5.0))
    with pytest.raises(asyncckpt.IncompatibleError, match="load it with 2 ranks"):
        asyncckpt.Loader(folder / "own", tensors={"w": target}).load()
    assert torch.equal(target.codes, codes(3))
    assert target.scale.item() == 5.0


def test_one_process_loads_what_ranks_have_saved(two: dict[str, list[Any]], folder: Path) -> None:
    target = OneScale(codes(3), torch.tensor(5.0))
    asyncckpt.Loader(folder / "same", tensors={"w": target}).load()
    assert torch.equal(target.codes, codes(1))
    assert target.scale.item() == 2.0
    assert asyncckpt.load(folder / "own")["w"]["scale"].tolist() == [2.0, 3.0]


def test_ranks_load_what_one_process_has_saved(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "alone", {"w": OneScale(codes(1), torch.tensor(2.0))})
    (found,) = by_ranks(tmp_path, 2, "load:alone")
    assert rows_of(found) == codes(1).tolist()
    assert [one["scale"] for one in found] == [2.0, 2.0]


def test_a_tensor_that_every_rank_has_whole(two: dict[str, list[Any]], three: dict[str, list[Any]]) -> None:
    assert [one["codes"] for one in two["whole:whole"]] == [codes(1).tolist()] * 2
    assert rows_of(three["load:whole"]) == codes(1).tolist()


@pytest.mark.parametrize("how", ["resume", "partly"])
def test_an_optimizer_goes_on(two: dict[str, list[Any]], three: dict[str, list[Any]], how: str) -> None:
    """A fresh one, and one in which only one of two parameters has a state."""
    assert two[f"{how}:trained"] == two["momentum:trained"]
    for key in ("codes", "weight", "scale"):
        assert rows_of(three[f"{how}:trained"], key) == rows_of(two["momentum:trained"], key)
