"""A table of which a checkpoint holds only a part, and a state dict that does not hold its tables: told by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.errors import IncompatibleError, UsageError
from asyncckpt.formats import parquet, recis
from tests.worlds.saves import save_one

IDS_COUNT = 100


def part_of(index: int, count: int) -> asyncckpt.HashTable:
    table = asyncckpt.HashTable("user", 4, shard=(index, count))
    ids = torch.arange(index, IDS_COUNT, count)
    table.insert(ids, torch.ones(len(ids), 4))
    return table


def test_a_part_that_is_saved_alone_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"table 'user' is a part.*shard 1 of 2.*process_group=.*alone=True"):
        asyncckpt.Saver(path=tmp_path / "run", hashtables={"user": part_of(1, 2)})
    assert not (tmp_path / "run").exists()


def test_a_part_that_is_saved_knowingly_does_not_load_as_the_whole(tmp_path: Path) -> None:
    alone = asyncckpt.RankOptions(alone=True)
    save_one(tmp_path, hashtables={"user": part_of(1, 2)}, ranks=alone)
    whole, part = asyncckpt.HashTable("user", 4), asyncckpt.HashTable("user", 4, shard=(3, 4))
    whole.insert(torch.arange(3), torch.zeros(3, 4))
    with pytest.raises(IncompatibleError, match=r"'user' takes ids of which the checkpoint has none.*shard 1 of 2"):
        asyncckpt.Loader(tmp_path, hashtables={"user": whole}).load()
    assert len(whole) == 3, "nothing was changed"
    report = asyncckpt.Loader(tmp_path, hashtables={"user": whole}, strict=False).load()
    assert (report.rows, report.missing) == ({"user": 50}, ("user: all but shard 1 of 2",))
    with pytest.warns(RuntimeWarning, match="only a part of table 'user': shard 1 of 2"):
        assert len(asyncckpt.load(tmp_path, tables=True)["user"]["id"]) == 50
    assert asyncckpt.Loader(tmp_path, hashtables={"user": part}).load().rows == {"user": 25}


@pytest.mark.parametrize("library", [parquet, recis], ids=["parquet", "recis"])
def test_a_part_that_is_exported_is_told(library: Any, tmp_path: Path) -> None:
    """What is written for another library says nothing of shards, so it would be taken for the whole."""
    if library is parquet:
        pytest.importorskip("pyarrow")
    alone = asyncckpt.RankOptions(alone=True)
    save_one(tmp_path / "run", hashtables={"user": part_of(1, 2)}, ranks=alone)
    with pytest.warns(RuntimeWarning, match="only a part of table 'user': shard 1 of 2"):
        assert library.export_checkpoint(tmp_path / "run", tmp_path / "out").rows == {"user": 50}


def test_a_rank_that_saves_alone_is_in_no_group() -> None:
    for options in ({"in_turn": True}, {"process_group": object()}):
        with pytest.raises(UsageError, match="alone"):
            asyncckpt.RankOptions(alone=True, **options)
    with pytest.raises(UsageError, match="shard_num"):
        asyncckpt.Saver(0, 2, path="never", ranks=asyncckpt.RankOptions(alone=True))


def model_with_table() -> torch.nn.Module:
    model = torch.nn.ModuleDict({"emb": asyncckpt.nn.HashEmbedding(4, name="user"), "head": torch.nn.Linear(4, 1)})
    model["emb"](torch.arange(IDS_COUNT))
    return model


def test_the_split_of_a_state_dict_finds_the_tables_of_its_modules(tmp_path: Path) -> None:
    model = model_with_table()
    sparse, dense = recis.split_sparse_dense_state_dict(model.state_dict())
    of_module = recis.split_sparse_dense_state_dict(model)
    assert list(sparse.items()) == list(of_module[0].items())
    assert list(dense) == ["head.weight", "head.bias"] == list(of_module[1])
    with asyncckpt.Saver(path=tmp_path, hashtables=sparse, tensors=dense) as saver:
        assert saver.save().rows_count == IDS_COUNT


def test_a_state_dict_that_has_lost_its_tables_is_refused() -> None:
    model = model_with_table()
    state = model.state_dict()
    with pytest.raises(UsageError, match="give the module"):
        recis.split_sparse_dense_state_dict(state.copy())
    del model
    with pytest.raises(UsageError, match=r"the table 'emb'.*give the module"):
        recis.split_sparse_dense_state_dict(state)
    assert recis.split_sparse_dense_state_dict(torch.nn.Linear(2, 1).state_dict())[0] == {}


def test_a_state_dict_is_not_saved_without_its_tables(tmp_path: Path) -> None:
    model = model_with_table()
    for state in (model.state_dict(), {"model": model.state_dict()}):
        with pytest.raises(UsageError, match=r"not be saved, found .*emb \(table 'user'\)"):
            asyncckpt.Saver(path=tmp_path, tensors=state)
    tables = {"user": model["emb"].table}
    asyncckpt.Saver(path=tmp_path, hashtables=tables, tensors=model.state_dict()).close()


def test_collections_are_found_by_their_state_dict() -> None:
    table = asyncckpt.embcache.EmbCacheTableConfig("a", 2, ("f",), cache_rows=4)
    model = torch.nn.ModuleDict({"bags": asyncckpt.embcache.EmbCacheEmbeddingBagCollection([table])})
    assert list(recis.split_sparse_dense_state_dict(model.state_dict())[0]) == list(asyncckpt.adapters.tables_of(model))
