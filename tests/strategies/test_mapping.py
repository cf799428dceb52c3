"""Sharded tensors and objects say what they are, and refuse what does not fit together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncckpt.errors import UsageError
from asyncckpt.strategies.mapping import (
    ShardedObject,
    ShardedTensor,
    is_main_replica,
    is_sharded_object,
    is_sharded_tensor,
    replaced,
    sharded_leaves,
    shown_path,
    split_unique_key,
)

pytestmark = pytest.mark.any_core


def test_rank_offsets_place_a_piece() -> None:
    data = torch.zeros(2, 3)
    piece = ShardedTensor.from_rank_offsets("k", data, (0, 1, 4), (2, 2, 3), prepend_axis_num=1, replica_id=(0, 1))
    assert piece.global_shape == (4, 2, 9)
    assert piece.global_offset == (1, 0, 6)
    assert piece.axis_fragmentations == (4, 1, 3)
    assert (piece.local_shape, piece.dtype, piece.replica_id) == ((2, 3), torch.float32, (0, 1))
    assert piece.has_regular_grid
    assert piece.global_slice() == (1, slice(0, 2), slice(6, 9))
    empty = piece.without_data()
    assert empty.data is None
    assert piece.data is data
    empty.init_data("cpu", torch.ones)
    assert torch.equal(empty.data, torch.ones(2, 3))
    piece.init_data("cpu")
    assert piece.data is data


def test_further_arguments_go_to_the_constructor() -> None:
    assert ShardedTensor.from_rank_offsets("k", torch.zeros(2), allow_shape_mismatch=True).allow_shape_mismatch


@pytest.mark.parametrize("offsets", [((0, 3, 3),), ((2, 0, 1),), ((-1, 0, 1),), ((0, -1, 2),)])
def test_wrong_rank_offsets_are_refused(offsets: Any) -> None:
    with pytest.raises(UsageError, match="rank offsets of 'k'"):
        ShardedTensor.from_rank_offsets("k", torch.zeros(2, 3), *offsets)
    with pytest.raises(UsageError, match="flattened"):
        ShardedTensor.from_rank_offsets("k", torch.zeros(2), flattened_range=slice(0, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"data": torch.zeros(2, 3, dtype=torch.int32)}, "dtype"),
        ({"data": torch.zeros(3, 2)}, "shape"),
        ({"global_offset": (0,)}, "global_offset"),
        ({"prepend_axis_num": 1}, "prepend_axis_num"),
        ({"global_offset": (1, 0)}, "regular grid"),
        ({"flattened_range": slice(0, 7), "data": torch.zeros(7)}, "flattened_range"),
        ({"flattened_range": slice(0, 4), "data": torch.zeros(3)}, "flattened_range"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], match: str) -> None:
    facts = {
        "key": "k",
        "data": torch.zeros(2, 3),
        "dtype": torch.float32,
        "local_shape": (2, 3),
        "global_shape": (4, 3),
        "global_offset": (2, 0),
        "axis_fragmentations": (2, 1),
    }
    ShardedTensor(**facts)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=match):
        ShardedTensor(**{**facts, **changes})  # type: ignore[arg-type]


def test_an_irregular_piece_may_begin_anywhere() -> None:
    piece = ShardedTensor("k", None, torch.float32, (2, 3), (4, 3), (1, 0), None)
    assert not piece.has_regular_grid


def test_a_flattened_piece_is_made_with_the_length_of_its_range() -> None:
    piece = ShardedTensor("k", None, torch.float32, (2, 3), (4, 3), (0, 0), None, flattened_range=slice(1, 5))
    piece.init_data("cpu", torch.zeros)
    assert piece.data is not None
    assert piece.data.shape == (4,)


@pytest.mark.parametrize("key", ["rng", "a/shard_b", "", "x/shard_0_1/y", "ü\n"])
def test_unique_keys_go_there_and_back(key: str) -> None:
    made = ShardedObject(key, b"x", (2, 3), (1, 2))
    assert made.unique_key == f"{key}/shard_1.2_2.3"
    back = ShardedObject.empty_from_unique_key(made.unique_key, replica_id=4)
    assert back == ShardedObject(key, None, (2, 3), (1, 2), 4)
    assert made.without_data().data is None
    assert split_unique_key(ShardedObject(key, None, (), ()).unique_key) == (key, (), ())


@pytest.mark.parametrize("text", ["", "key", "key/shard_", "key/shard_0", "key/shard_a_b", "key/shard_0_1_2"])
def test_a_text_that_is_no_unique_key_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="unique key"):
        split_unique_key(text)


def test_an_object_needs_one_offset_per_dimension() -> None:
    with pytest.raises(UsageError, match="'k'"):
        ShardedObject("k", None, (1, 2), (0,))


@pytest.mark.parametrize(
    ("replica_id", "is_main"), [(0, True), (1, False), ((0, 0), True), ((0, 1), False), ((), True)]
)
def test_the_main_replica_has_zeros_only(replica_id: Any, is_main: bool) -> None:
    assert is_main_replica(replica_id) is is_main


def test_foreign_classes_are_known_by_their_attributes() -> None:
    tensor = SimpleNamespace(key="k", local_shape=(), global_shape=(), global_offset=(), replica_id=0)
    thing = SimpleNamespace(key="k", unique_key="k", global_shape=(), global_offset=(), replica_id=0)
    assert (is_sharded_tensor(tensor), is_sharded_object(tensor)) == (True, False)
    assert (is_sharded_tensor(thing), is_sharded_object(thing)) == (False, True)
    assert not is_sharded_tensor(torch.zeros(1))
    assert not is_sharded_object(torch.zeros(1))


def test_leaves_are_found_and_replaced_in_one_order() -> None:
    one, two, three = (ShardedObject(key, None, (1,), (0,)) for key in "abc")
    state = {"x": [one, {7: two}], ("tuple", "key"): (three,), "empty": {}}
    paths, leaves = zip(*sharded_leaves(state), strict=True)
    assert leaves == (one, two, three)
    assert paths == (("x", 0), ("x", 1, 7), (("tuple", "key"), 0))
    assert replaced(state, iter("abc")) == {"x": ["a", {7: "b"}], ("tuple", "key"): ("c",), "empty": {}}
    assert shown_path(paths[1]) == "'x'[1][7]"
    assert shown_path(()) == "(root)"


def test_a_leaf_that_is_not_sharded_is_named() -> None:
    with pytest.raises(UsageError, match=r"'a'\['lr'\]"):
        list(sharded_leaves({"a": {"lr": 0.1}}))
    endless: dict[str, Any] = {}
    endless["x"] = endless
    with pytest.raises(UsageError, match="nested too deeply"):
        list(sharded_leaves(endless))
