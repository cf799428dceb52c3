"""The walk finds every table once, by its path."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import asyncckpt
from asyncckpt.adapters import register_adapter, tables_of
from asyncckpt.errors import UsageError
from asyncckpt.modules.walk import DEPTH_MAX, walk
from asyncckpt.tables.emb_cache_modules import EmbCacheEmbeddingBagCollection, EmbCacheTableConfig


class Node(nn.Module):
    """A module with children that a test gives it, itself for example."""


def chain(depth: int) -> nn.Module:
    """A module with an nn.Embedding that many levels below it."""
    module: nn.Module = nn.Embedding(2, 2)
    for _ in range(depth):
        outer = Node()
        outer.inner = module
        module = outer
    return module


def test_names_are_paths() -> None:
    model = nn.ModuleDict(
        {"user": nn.Embedding(3, 2), "deep": nn.Sequential(nn.Linear(2, 2), nn.EmbeddingBag(4, 2)), "x": nn.ReLU()}
    )
    tables = tables_of(model)
    assert list(tables) == ["user", "deep.1"]
    assert [table.name for table in tables.values()] == ["user", "deep.1"]
    assert list(tables_of(model, prefix="model")) == ["model.user", "model.deep.1"]


def test_a_root_that_is_a_table_has_a_name() -> None:
    assert list(tables_of(nn.Embedding(3, 2))) == ["embedding"]
    assert list(tables_of(nn.Embedding(3, 2), prefix="user")) == ["user"]


def test_our_own_tables_are_found() -> None:
    table = asyncckpt.HashTable("item", 4)
    model = nn.ModuleDict({"a": asyncckpt.nn.HashEmbedding(table), "b": asyncckpt.nn.HashEmbeddingBag(8, name="other")})
    tables = tables_of(model)
    assert list(tables) == ["a", "b"]
    assert tables["a"] is table
    assert list(tables_of(model["a"])) == ["item"]


def test_tables_of_our_collections_have_their_own_names() -> None:
    configs = [EmbCacheTableConfig(name, 4, (f"feature_{name}",), cache_rows=8) for name in ("t1", "t2")]
    collection = EmbCacheEmbeddingBagCollection(tables=configs)
    tables = tables_of(nn.Sequential(nn.ReLU(), collection))
    assert list(tables) == ["1.t1", "1.t2"]
    assert tables["1.t2"] is collection.tables()["t2"]


def test_a_shared_module_and_a_shared_table_are_found_once() -> None:
    table = asyncckpt.HashTable("item", 4)
    shared = nn.Embedding(3, 2)
    model = nn.ModuleDict({"a": shared, "b": shared})
    model["c"] = asyncckpt.nn.HashEmbedding(table)
    model["d"] = asyncckpt.nn.HashEmbedding(table)
    assert list(tables_of(model)) == ["a", "c"]


def test_tied_weights_are_found_once() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(3, 2), "b": nn.Embedding(3, 2)})
    model["b"].weight = model["a"].weight
    assert list(tables_of(model)) == ["a"]


def test_a_module_that_contains_itself_is_walked_once() -> None:
    outer, inner = Node(), Node()
    outer.inner, inner.outer, inner.again = inner, outer, inner
    inner.user = nn.Embedding(2, 2)
    assert list(tables_of(outer)) == ["inner.user"]
    assert len(walk(outer).others) == 2


def test_the_walk_has_a_limit() -> None:
    assert list(tables_of(chain(DEPTH_MAX))) == [".".join(["inner"] * DEPTH_MAX)]
    with pytest.raises(
        UsageError, match=r"modules are nested too deeply: 'inner.inner.*found 501, expected at most 500"
    ):
        tables_of(chain(DEPTH_MAX + 1))


def test_wrappers_are_no_part_of_a_path() -> None:
    model = nn.ModuleDict({"user": nn.Embedding(3, 2), "dense": nn.Linear(2, 1)})
    wrapped = nn.ModuleDict({"top": torch.nn.DataParallel(torch.nn.DataParallel(model))})
    assert list(tables_of(wrapped)) == ["top.user"]
    assert [path for path, _ in walk(wrapped).others][-1] == "top.dense"


@pytest.mark.usefixtures("own_registry")
def test_two_tables_of_one_name_are_refused() -> None:
    def same_name(module: nn.Module, name: str) -> dict[str, asyncckpt.table.Table]:
        return {"t1": asyncckpt.HashTable("t1", 2)}

    register_adapter(Node, same_name)
    model = nn.ModuleDict({"left": Node(), "right": Node()})
    with pytest.raises(UsageError, match="modules 'left' and 'right' both hold a table 't1'"):
        tables_of(model)


@pytest.mark.usefixtures("own_registry")
def test_nobody_looks_below_a_module_that_was_taken() -> None:
    register_adapter(Node, lambda module, name: {})
    module = Node()
    module.inner = nn.Embedding(2, 2)
    assert tables_of(module) == {}


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no module to walk, found a dict"):
        tables_of({"user": nn.Embedding(2, 2)})  # type: ignore[arg-type]
