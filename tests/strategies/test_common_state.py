"""The common state, and objects that are saved beside it."""

from __future__ import annotations

import argparse
import enum
import io
import sys
import types
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.errors import NotFoundError, UsageError
from asyncckpt.strategies import CommonLoad, CommonSave, ShardedSave
from asyncckpt.strategies.mapping import ShardedObject, ShardedTensor

pytestmark = pytest.mark.any_core
SAVE, LOAD = CommonSave(), CommonLoad()


def test_the_common_state_comes_back(tmp_path: Path) -> None:
    state = {
        "args": argparse.Namespace(dtype=torch.bfloat16, sizes=[1, (2, 3)], path=None),
        "iteration": 120,
        "checkpoint_version": 3.0,
        "optimizer": {"param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95)}], "step": torch.tensor(5)},
        "blob": io.BytesIO(b"raw"),
        7: "int key",
    }
    SAVE.save_common(state, tmp_path)
    found = LOAD.load_common(str(tmp_path))
    assert found.pop("blob").read() == b"raw"
    assert found["optimizer"].pop("step").item() == 5
    del state["blob"], state["optimizer"]["step"]
    assert found == state


def test_a_sharded_leaf_or_an_object_of_a_class_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'model'\['w'\]"):
        SAVE.save_common({"model": {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1))}}, tmp_path / "iter")
    assert not (tmp_path / "iter").exists()


def test_saving_again_replaces_the_common_state(tmp_path: Path) -> None:
    for number in range(3):
        SAVE.save_common({"iteration": number}, tmp_path)
    assert LOAD.load_common(tmp_path) == {"iteration": 2}
    assert asyncckpt.list_steps(tmp_path / "common") == [2]


def test_without_a_common_state_there_is_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="has no 'common' state"):
        LOAD.load_common(tmp_path)


def test_the_common_state_may_be_a_sharded_object(tmp_path: Path) -> None:
    """As Megatron-Core saves it from 0.19 on."""
    state = {"common_state": ShardedObject("common_state", {"iteration": 5}, (1,), (0,), replica_id=0)}
    ShardedSave().save(state, tmp_path)
    assert LOAD.load_common(tmp_path) == {"iteration": 5}


def test_objects_are_saved_beside_it(tmp_path: Path) -> None:
    objects = {"model": [ShardedObject("extra", io.BytesIO(b"x"), (2,), (n,)) for n in range(2)]}
    SAVE.save_sharded_objects(objects, tmp_path)
    found = LOAD.load_sharded_objects({"model": [item.without_data() for item in objects["model"]]}, tmp_path)
    assert [item.read() for item in found["model"]] == [b"x", b"x"]
    metadata = LOAD.load_sharded_metadata(tmp_path)
    assert metadata == {item.unique_key: item.without_data() for item in objects["model"]}
    assert LOAD.load_sharded_objects({}, tmp_path / "elsewhere") == {}
    assert LOAD.load_sharded_metadata(tmp_path / "elsewhere") == {}


def test_a_tensor_is_no_object(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'w'"):
        SAVE.save_sharded_objects({"w": ShardedTensor.from_rank_offsets("w", torch.ones(1))}, tmp_path)


def test_each_call_is_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    SAVE.save_common({"iteration": 1}, tmp_path)
    SAVE.save_sharded_objects({"o": ShardedObject("o", 1, (1,), (0,))}, tmp_path)
    ShardedSave().save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(1))}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["common", "objects", "sharded"]
    for part in tmp_path.iterdir():
        asyncckpt.verify(part)


def test_why_the_common_object_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("late_module")
    module.Backend = enum.Enum("Backend", "A", module="late_module")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "late_module", module)
    state = {"common_state": ShardedObject("common_state", {"b": module.Backend.A}, (1,), (0,), replica_id=0)}
    ShardedSave().save(state, tmp_path)
    monkeypatch.delitem(sys.modules, "late_module")
    with pytest.raises(NotFoundError, match="import its module before loading"):
        LOAD.load_common(tmp_path)
