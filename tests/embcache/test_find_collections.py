"""Collections are found anywhere in a module; what holds none is refused with a hint."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import asyncckpt
from asyncckpt.embcache import EmbCacheEmbeddingBagCollection
from asyncckpt.embcache.find_collections import CHILDREN_MAX, DEPTH_MAX, find_collections, saved_tables
from tests.embcache.models import CachedNet, config

UsageError = asyncckpt.UsageError


def collection(name: str = "user") -> EmbCacheEmbeddingBagCollection:
    return EmbCacheEmbeddingBagCollection([config(name)])


def wrapped(module: nn.Module, levels: int) -> nn.Module:
    for _ in range(levels):
        outer = nn.Module()
        outer.add_module("inner", module)
        module = outer
    return module


def test_root_itself_is_found() -> None:
    root = collection()
    assert find_collections(root) == {"": root}


def test_collections_are_found_with_their_paths() -> None:
    net = CachedNet()
    assert find_collections(net) == {"bags": net.bags, "below.words": net.below["words"]}
    assert list(saved_tables(net).tables) == ["user", "ad", "word"]


def test_companions_are_saved_beside_their_table() -> None:
    saved = saved_tables(CachedNet(admit_after=3))
    assert list(saved.tables) == ["user", "ad", "word"]
    assert list(saved.companions) == ["ad.candidates"]


def test_collection_within_a_collection_is_found() -> None:
    outer, inner = collection(), collection("ad")
    outer.add_module("more", inner)
    assert list(saved_tables(outer).tables) == ["user", "ad"]


def test_500_children_pass_and_501_are_refused() -> None:
    root = nn.ModuleList([nn.Identity() for _ in range(CHILDREN_MAX - 1)])
    root.append(collection())
    assert list(find_collections(root)) == ["499"]
    root.append(nn.Identity())
    with pytest.raises(UsageError, match=r"'itself' has too many children, found 501, expected at most 500"):
        find_collections(root)
    with pytest.raises(UsageError, match=r"module 'inner\.inner' has too many children"):
        find_collections(wrapped(root, 2))


def test_depth_500_is_found_and_501_refused() -> None:
    # The collection holds a list of modules: two levels of its own below it.
    deepest = wrapped(collection(), DEPTH_MAX - 3)
    assert len(find_collections(deepest)) == 1
    with pytest.raises(UsageError, match=r"nested too deeply.*at most 500 levels"):
        find_collections(wrapped(deepest, 1))


def test_depth_is_limited_also_without_collections() -> None:
    with pytest.raises(UsageError, match="no multi-level tables"):
        find_collections(wrapped(nn.Identity(), DEPTH_MAX - 1))
    with pytest.raises(UsageError, match="nested too deeply"):
        find_collections(wrapped(nn.Identity(), DEPTH_MAX))


def test_cyclic_module_is_visited_once() -> None:
    root = nn.Module()
    below = wrapped(collection(), 2)
    root.add_module("below", below)
    below.add_module("back", root)
    assert list(find_collections(root)) == ["below.inner.inner"]


def test_cyclic_module_without_collections_is_refused() -> None:
    root = nn.Sequential(nn.Linear(2, 2))
    root.add_module("self", root)
    with pytest.raises(UsageError, match=r"asyncckpt\.Saver\(tensors="):
        find_collections(root)


def test_shared_collection_is_saved_once() -> None:
    shared = collection()
    root = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    assert list(find_collections(root)) == ["a"]


def test_two_tables_of_one_name_are_refused() -> None:
    root = nn.ModuleDict({"a": collection(), "b": collection()})
    with pytest.raises(UsageError, match=r"name 'user'.*'a' and 'b'"):
        saved_tables(root)


def test_name_of_a_companion_is_taken_too() -> None:
    root = nn.ModuleDict(
        {
            "a": EmbCacheEmbeddingBagCollection([config(admit_after=2)]),
            "b": collection("user.candidates"),
        }
    )
    with pytest.raises(UsageError, match=r"name 'user\.candidates'"):
        saved_tables(root)


@pytest.mark.parametrize(
    ("module", "hint"),
    [
        (nn.Linear(2, 2), "save dense state with asyncckpt.Saver"),
        (nn.BatchNorm1d(2, affine=False), "save dense state with asyncckpt.Saver"),
        (nn.Sequential(asyncckpt.nn.HashEmbedding(4)), "save hash tables with asyncckpt.Saver"),
        (nn.Identity(), "EmbCacheEmbeddingBagCollection or EmbCacheEmbeddingCollection"),
        (torch.zeros(3), "saved with asyncckpt.Saver"),
        ({"w": torch.zeros(3)}, "saved with asyncckpt.Saver"),
        (None, "torch.nn"),
    ],
)
def test_what_holds_no_collection_is_refused_with_a_hint(module: object, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_collections(module)
    assert hint in str(caught.value)
