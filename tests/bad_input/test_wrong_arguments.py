"""Every parameter of the public functions and classes, with values of every wrong kind: taken, or a CheckpointError.

The parameters are those of the signatures, so a new one is tried without a change here.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
import asyncckpt.dcp
import asyncckpt.filters

pytestmark = pytest.mark.any_core

VALUES: dict[str, Any] = {
    "None": None, "True": True, "5": 5, "-1": -1, "2**80": 2**80, "1.5": 1.5, "nan": math.nan, "text": "abc",
    "no text": "", "bytes": b"x", "list": [1], "no list": [], "dict": {1: 2}, "tuple": (1, 2, 3), "object": object(),
    "tensor": torch.ones(2), "class": int, "function": print,
}  # fmt: skip


class AtHand:
    """What calls need beside the argument that is tried."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = {"x": torch.ones(3)}
        self.table = asyncckpt.HashTable("t", 2)
        self.table.insert(torch.arange(3), torch.ones(3, 2))
        with self.saver() as saver:
            saver.save(1)

    def saver(self, **options: Any) -> asyncckpt.Saver:
        return asyncckpt.Saver(path=self.path, tensors=self.state, hashtables={"t": self.table}, **options)


def constructors(world: AtHand) -> Mapping[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Each with the arguments that it needs at least."""
    fresh = {"path": world.path}
    soon = asyncckpt.RankOptions(peer_deadline=0.05)
    embedding = asyncckpt.nn.HashEmbedding(world.table)
    return {
        "Saver": (asyncckpt.Saver, {**fresh, "ranks": soon}),
        "Loader": (asyncckpt.Loader, {"checkpoint_path": world.path}),
        "PeriodicSaver": (asyncckpt.PeriodicSaver, {"saver": world.saver(), "every_steps": 1}),
        "BusyPolicy": (asyncckpt.BusyPolicy, {}),
        "DeltaPolicy": (asyncckpt.DeltaPolicy, {}),
        "DeviceOptions": (asyncckpt.DeviceOptions, {}),
        "RankOptions": (asyncckpt.RankOptions, {}),
        "DebugOptions": (asyncckpt.DebugOptions, {}),
        "HashTable": (asyncckpt.HashTable, {"name": "u", "dim": 2}),
        "MultiLevelTable": (asyncckpt.MultiLevelTable, {"name": "u", "dim": 2, "cache_rows": 4}),
        "HashEmbedding": (asyncckpt.nn.HashEmbedding, {"table": world.table}),
        "HashEmbeddingBag": (asyncckpt.nn.HashEmbeddingBag, {"table": world.table}),
        "SparseAdagrad": (asyncckpt.optim.SparseAdagrad, {"modules": embedding, "lr": 0.1}),
        "SparseAdam": (asyncckpt.optim.SparseAdam, {"modules": embedding}),
        "SparseAdamW": (asyncckpt.optim.SparseAdamW, {"modules": embedding}),
        "SparseFTRL": (asyncckpt.optim.SparseFTRL, {"modules": embedding}),
        "SparseSGD": (asyncckpt.optim.SparseSGD, {"modules": embedding, "lr": 0.1}),
        "Uniform": (asyncckpt.nn.Uniform, {"bound": 1.0}),
        "Slot": (asyncckpt.Slot, {"dtype": torch.float32, "row_shape": (2,)}),
        "Piece": (asyncckpt.Piece, {"tensor": torch.ones(2), "begin": (0,)}),
        "sharded": (asyncckpt.sharded, {"tensor": torch.ones(2), "begin": (0,), "whole_shape": (2,)}),
        "StorageWriter": (asyncckpt.dcp.StorageWriter, fresh),
        "StorageReader": (asyncckpt.dcp.StorageReader, fresh),
        "AsyncStager": (asyncckpt.dcp.AsyncStager, {}),
        "SavePlanner": (asyncckpt.dcp.SavePlanner, {}),
        "keep_rows": (asyncckpt.filters.keep_rows, {"table": "t", "predicate": any}),
        "cast": (asyncckpt.filters.cast, {"name": "x", "dtype": torch.bfloat16}),
        "quantize": (asyncckpt.filters.quantize, {"name": "x"}),
        "skip_zero_rows": (asyncckpt.filters.skip_zero_rows, {"name": "x"}),
        "compress": (asyncckpt.filters.compress, {}),
    }


def calls(world: AtHand) -> Mapping[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Methods of what was made rightly, and functions."""
    saver = world.saver(on_busy="wait")
    periodic = asyncckpt.PeriodicSaver(saver, every_steps=1)
    future = saver.save_async()
    path = {"path": world.path}
    ids, rows = torch.arange(2), torch.ones(2, 2)
    return {
        "save": (saver.save, {}),
        "save_async": (saver.save_async, {}),
        "compact": (saver.compact, {}),
        "wait_idle": (saver.wait_idle, {}),
        "step": (periodic.step, {"step": 1}),
        "drain": (periodic.drain, {}),
        "result": (future.result, {}),
        "wait_staged": (future.wait_staged, {}),
        "list_steps": (asyncckpt.list_steps, path),
        "describe": (asyncckpt.describe, path),
        "verify": (asyncckpt.verify, path),
        "compact a directory": (asyncckpt.compact, {"path": world.path, "step": 1}),
        "follow": (asyncckpt.follow, path),
        "lookup": (world.table.lookup, {"ids": ids}),
        "insert": (world.table.insert, {"ids": ids, "values": rows}),
        "remove": (world.table.remove, {"ids": ids}),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("of", [constructors, calls])
def test_a_wrong_argument_is_refused_by_an_error_of_ours(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    of: Callable[[AtHand], Mapping[str, tuple[Callable[..., Any], dict[str, Any]]]],
) -> None:
    monkeypatch.chdir(tmp_path)  # Some values are names of folders.
    found = []
    for name, (function, needed) in of(AtHand(tmp_path / "root")).items():
        for parameter in parameters(function):
            for kind, value in VALUES.items():
                error = outcome(function, {**needed, parameter: value})
                if error is not None:
                    found.append(f"{name}({parameter}={kind}): {error!r}")
    assert found == []


def parameters(function: Callable[..., Any]) -> Iterator[str]:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            yield parameter.name


def outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> BaseException | None:
    """What it raises, unless that is an error of ours."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = function(**arguments)
            if hasattr(made, "close"):
                made.close()
    except asyncckpt.CheckpointError:
        return None
    except Exception as error:
        return error
    return None
