"""What DCP pickles as values, and a Saver takes, goes through the door too: as by DCP's own files, without a pickle."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import asyncckpt
import asyncckpt.dcp
from asyncckpt.dcp import StorageReader, StorageWriter

VALUES: dict[str, Any] = {
    "array": np.arange(12, dtype=np.int16).reshape(3, 4).T,
    "large array": np.arange(300_000.0),
    "empty array": np.zeros((0, 3), dtype=np.float16),
    "no dimensions": np.array(3.5),
    "scalar": np.float32(2.5),
    "tensor in a tuple": (torch.arange(4), "x", 2.5),
    "tensors in deep tuples": ({"a": (torch.ones(2), [torch.zeros(1), None])}, np.int64(3)),
    "arrays in a list": [np.ones(2), 3, np.float64(1)],
    "array beside a tensor": [torch.ones(2), np.ones(3), {"b": np.int8(1)}],
    "array in a dict": {"a": {"b": np.ones(2), "c": 1}},
    "random state": np.random.RandomState(3).get_state(),
    "counter": {"milestones": Counter([2, 4, 4]), "groups": [Counter("a"), 3]},
    "counters in a tuple": (Counter("aab"), defaultdict(list, a=[1])),
    "plain": ({1, 2}, b"x", 1 + 2j, torch.Size([2]), random.Random(3).getstate()),
}


def same(found: Any, expected: Any) -> bool:
    if type(found) is not type(expected):
        return False
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, (np.ndarray, np.generic, torch.Tensor)):
        return bool((found.dtype, found.shape) == (expected.dtype, expected.shape) and (found == expected).all())
    return bool(found == expected)


def blank(value: Any) -> Any:
    """A state of the same form as DCP sees it, with other contents."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 7)
    if isinstance(value, dict):
        return type(value)({key: blank(item) for key, item in value.items()})
    if type(value) is list and any(isinstance(item, (torch.Tensor, dict)) for item in value):
        return [blank(item) for item in value]
    return "blank"


def through(path: Path, state: Any, writer: Any, reader: Any) -> Any:
    dcp.save(state, storage_writer=writer(path))
    found = blank(state)
    dcp.load(found, storage_reader=reader(path))
    return found


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_as_by_the_files_of_dcp(tmp_path: Path, name: str) -> None:
    state = {"v": VALUES[name], "t": torch.ones(3), "epoch": 4}
    found = through(tmp_path / "ours", state, StorageWriter, StorageReader)
    assert same(found, through(tmp_path / "dcp", state, dcp.FileSystemWriter, dcp.FileSystemReader))
    whole = asyncckpt.load(tmp_path / "ours")
    asyncckpt.save(tmp_path / "saver", state)
    if name != "counter":  # DCP's names say nothing of the kind of a mapping.
        assert same(whole, asyncckpt.load(tmp_path / "saver"))
    again = blank(state)
    dcp.load(again, storage_reader=StorageReader(tmp_path / "saver"))
    assert same(again, found)


def test_plans_that_are_kept_see_other_values(tmp_path: Path) -> None:
    """A planner that finds the same names may find other kinds, and other shapes."""
    values = [np.ones(2), 3, np.ones(2), np.ones(3), (np.ones(3), 4), (np.ones(3), 5), torch.Size([1])]
    for step, value in enumerate(values):
        state = {"v": value, "t": torch.full((2,), float(step))}
        planner = asyncckpt.dcp.SavePlanner()
        dcp.save(state, storage_writer=StorageWriter(tmp_path, step=step), planner=planner)
    for step, value in enumerate(values):
        found: dict[str, Any] = {"v": None, "t": torch.zeros(2)}
        dcp.load(found, storage_reader=StorageReader(tmp_path, step=step))
        assert same(found["v"], value)
        assert found["t"].tolist() == [step] * 2


def test_an_async_save_keeps_the_values_of_the_call(tmp_path: Path) -> None:
    state = {"v": (np.ones(2), [torch.ones(2)]), "a": np.zeros(3)}
    saved = dcp.async_save(state, storage_writer=StorageWriter(tmp_path))
    state["v"][0][:] = 5
    state["v"][1][0].fill_(5)
    state["a"][:] = 5
    getattr(saved, "upload_completion", saved).result(60)
    found: dict[str, Any] = {"v": None, "a": None}
    dcp.load(found, storage_reader=StorageReader(tmp_path))
    assert same(found, {"v": (np.ones(2), [torch.ones(2)]), "a": np.zeros(3)})


def test_an_array_goes_into_a_tensor_of_its_shape(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"a": np.arange(3.0)})
    target = torch.zeros(3, dtype=torch.float64)
    dcp.load({"a": target}, storage_reader=StorageReader(tmp_path))
    assert target.tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(CheckpointException, match="tensor 'a' does not fit the checkpoint"):
        dcp.load({"a": torch.zeros(2)}, storage_reader=StorageReader(tmp_path))


@pytest.mark.parametrize("value", [np.array([object()]), (np.array(["text"]),), (torch.ones(2).to_sparse(),)])
def test_what_a_saver_does_not_take_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointException, match="'v"):
        dcp.save({"v": value}, storage_writer=StorageWriter(tmp_path))
    assert asyncckpt.list_steps(tmp_path) == []
