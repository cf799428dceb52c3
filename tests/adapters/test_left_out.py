"""A Saver refuses to leave out tables of its modules, and names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import embcache
from asyncckpt.adapters import dense_state_of, tables_of


class Model(torch.nn.Module):
    """Holds tables in the ways people do: in a module, as an attribute, in a list and in a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.users = asyncckpt.HashEmbedding(2, name="user")
        self.plain = asyncckpt.HashTable("plain", 2)
        self.listed = [asyncckpt.HashTable("first", 2)]
        self.named = {"b": asyncckpt.MultiLevelTable("second", 2, cache_rows=4, admit_after=2)}
        self.dense = torch.nn.Linear(2, 1)
        self.itself: Any = [self]

    def by_hand(self) -> dict[str, Any]:
        return {"user": self.users.table, "plain": self.plain, "first": self.listed[0], "second": self.named["b"]}


def test_a_module_among_the_tensors_needs_its_tables(tmp_path: Path) -> None:
    model = Model()
    for state in ({"model": model}, {"state": {"models": [model]}}):
        with pytest.raises(
            asyncckpt.UsageError, match="tables of a module would be left out of the checkpoint"
        ) as caught:
            asyncckpt.Saver(path=tmp_path, tensors=state)
        for path, name in (
            ("users.table", "user"),
            ("plain", "plain"),
            ("listed.0", "first"),
            ("named.b", "second"),
        ):
            assert f"{path} (table {name!r})" in str(caught.value)
    tables = model.by_hand()
    del tables["plain"]
    with pytest.raises(asyncckpt.UsageError, match=r"found \"?'?model\.plain \(table 'plain'\)"):
        asyncckpt.Saver(path=tmp_path, hashtables=tables, tensors={"model": model})
    with asyncckpt.Saver(path=tmp_path, hashtables=model.by_hand(), tensors={"model": model}) as saver:
        saver.save(1)


def test_what_asks_for_dense_state_gets_it(tmp_path: Path) -> None:
    model = Model()
    tensors = {"model": dense_state_of(model), "state": model.state_dict()}
    with asyncckpt.Saver(path=tmp_path, tensors=tensors) as saver:
        saver.save(1)


def test_the_tables_of_a_module_are_all_of_them() -> None:
    model = Model()
    with pytest.raises(asyncckpt.UsageError, match=r"plain \(table 'plain'\)"):
        tables_of(model)
    del model.plain, model.listed, model.named
    assert list(tables_of(model)) == ["users"]


def test_a_collection_leaves_no_table_beside_it(tmp_path: Path) -> None:
    config = embcache.EmbCacheTableConfig("item", 2, ["f"], cache_rows=4, admit_after=2)
    model = torch.nn.ModuleDict({"ebc": embcache.EmbCacheEmbeddingBagCollection([config])})
    embcache.Saver(rank=0, world_size=1).save(model, str(tmp_path / "one"))
    model["users"] = asyncckpt.HashEmbedding(2, name="user")
    with pytest.raises(asyncckpt.UsageError, match=r"users\.table \(table 'user'\)"):
        embcache.Saver(rank=0, world_size=1).save(model, str(tmp_path / "two"))


def test_many_tables_are_counted(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.tables = [asyncckpt.HashTable(f"t{number}", 1) for number in range(11)]  # type: ignore[assignment]
    with pytest.raises(asyncckpt.UsageError, match=r"model\.tables\.7 \(table 't7'\), 3 more"):
        asyncckpt.Saver(path=tmp_path, tensors={"model": model})
