"""`asyncckpt.save` saves a state once; what a new user gets wrong is refused in words that help."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asyncckpt
from tests.end_to_end.trees import differences


def test_one_call_saves_and_one_loads(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a" / "ckpt"
    state = {"w": torch.arange(4), "n": 1, 7: None}
    with pytest.raises(asyncckpt.UsageError, match="top-level name"):
        asyncckpt.save(path, state)  # type: ignore[arg-type]
    del state[7]
    assert asyncckpt.save(path, state, metadata={"loss": 0.5}).step == 0
    assert asyncckpt.save(path, state).step == 1
    assert asyncckpt.save(path, state, 10).step == 10
    assert list(differences(asyncckpt.load(path), state)) == []
    assert asyncckpt.describe(path, 0).metadata == {"loss": 0.5}
    with pytest.raises(asyncckpt.ConflictError, match="step 10 already exists"):
        asyncckpt.save(path, state, 10)


def test_tables_are_saved_with_it(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("user", 2)
    table.lookup(torch.arange(5))
    asyncckpt.save(tmp_path / "d", {}, hashtables={"user": table})
    assert asyncckpt.load(tmp_path / "d", tables=True)["user"]["id"].sort().values.tolist() == [0, 1, 2, 3, 4]


def test_a_part_of_a_table_is_not_saved_as_the_whole(tmp_path: Path) -> None:
    """Every rank that calls it would save its own part, and the last one would win."""
    part = asyncckpt.HashTable("user", 2, shard=(1, 2))
    for given in ({"user": part}, torch.nn.ModuleDict({"user": asyncckpt.nn.HashEmbedding(part)})):
        with pytest.raises(asyncckpt.UsageError, match=r"'user' is a part.*shard 1 of 2.*alone=True"):
            asyncckpt.save(tmp_path / "d", {}, hashtables=given)
    assert not (tmp_path / "d").exists()


def test_it_waits_for_a_save_in_flight(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path / "one", tensors={"w": torch.ones(3)}) as saver:
        future = saver.save_async(1)
        asyncckpt.save(tmp_path / "two", {"w": torch.ones(3)})
        assert future.done()


@pytest.mark.parametrize("state", [None, [1], "x", torch.ones(2)])
def test_what_is_no_state_is_named(tmp_path: Path, state: object) -> None:
    with pytest.raises(asyncckpt.UsageError, match=r"state|nothing was given"):
        asyncckpt.save(tmp_path / "d", state)  # type: ignore[arg-type]


def test_a_save_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(asyncckpt.UsageError, match="nothing was given"):
        asyncckpt.save(tmp_path / "d", {})
    with asyncckpt.Saver(path=tmp_path / "d") as saver:
        for call in (saver.save, saver.save_async):
            with pytest.raises(asyncckpt.UsageError, match=r"nothing was given to save.*hashtables or tensors"):
                call(1)
        assert asyncckpt.list_steps(tmp_path / "d") == []
        saver.save(1, metadata={"note": "no model yet"})


def test_a_path_in_the_place_of_the_rank_is_said(tmp_path: Path) -> None:
    for path in (str(tmp_path / "d"), tmp_path / "d"):
        with pytest.raises(asyncckpt.UsageError, match=r"shard_index is a path.*Saver\(path=\.\.\., tensors=\.\.\.\)"):
            asyncckpt.Saver(path, {"w": torch.ones(2)})  # type: ignore[arg-type]
