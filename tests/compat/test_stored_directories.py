"""Directories that earlier versions have written load bit for bit.

Each folder beside this file is named after the commit whose code wrote it (write.py), and is never written again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from tests.compat import states, write

WRITTEN = sorted(path for path in Path(__file__).parent.iterdir() if (path / "full").exists())
OF_STATES = ("full", "encoded")
OF_RANKS = [f"{kind}-{count}" for kind in ("chain", "compacted") for count in write.RANKS] + ["store-1"]


@pytest.fixture(params=WRITTEN, ids=lambda path: path.name)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A copy of what one commit wrote: what a load did to the stored files would be seen here."""
    copy = tmp_path / "written"
    shutil.copytree(request.param, copy)
    before = digest_of(copy)
    yield copy
    assert digest_of(copy) == before


def digest_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_same(found: Any, expected: Any, at: str = "state") -> None:
    """Types, keys, order and bits are equal."""
    if hasattr(expected, "state_dict"):
        expected = dict(expected.state_dict())
        found = dict(found.state_dict() if hasattr(found, "state_dict") else found)
    assert isinstance(expected, torch.Tensor) or type(found) is type(expected), at
    if isinstance(expected, torch.Tensor | np.ndarray | np.generic):
        tensors = [torch.as_tensor(value).detach().contiguous() for value in (found, expected)]
        assert len({(tensor.dtype, tensor.shape) for tensor in tensors}) == 1, at
        assert torch.equal(*[tensor.reshape(-1).view(torch.uint8) for tensor in tensors]), at
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected), at
        for key, value in expected.items():
            check_same(found[key], value, f"{at}.{key}")
    elif isinstance(expected, list | tuple) and type(expected) is not torch.Size:
        assert len(found) == len(expected), at
        for index, value in enumerate(expected):
            check_same(found[index], value, f"{at}.{index}")
    else:
        assert repr(found) == repr(expected), at


def check_tables(found: Mapping[str, Any], step: int) -> None:
    for name, table in found.items():
        owned = torch.from_numpy(states.ids_at(step))
        owned = owned[table.owns(owned)]
        assert sorted(table.ids().tolist()) == owned.tolist(), name
        found_columns = table.read(owned)
        for column, expected in states.columns_of(name, owned.numpy(), step).items():
            check_same(found_columns[column], expected, f"{name}.{column}")


def check_rows(columns: Mapping[str, torch.Tensor], name: str, step: int) -> None:
    """A table as `asyncckpt.load` returns it."""
    order = torch.argsort(columns["id"])
    ids = states.ids_at(step)
    assert columns["id"][order].tolist() == ids.tolist()
    for column, expected in states.columns_of(name, ids, step).items():
        check_same(columns[column][order], expected, f"{name}.{column}")


@pytest.mark.parametrize("kind", OF_STATES)
def test_a_state_of_every_kind_comes_back(written: Path, kind: str) -> None:
    assert asyncckpt.verify(written / kind)
    expected, found = states.state(1), asyncckpt.load(written / kind, tables=True)
    for name in states.tables():
        check_rows(found.pop(name), name, 1)
    check_same(found, expected)
    assert (found["tied"][0] is found["tied"][1]) == (kind == "full")  # A filter may change one of two.
    target, tables = states.state(7), states.tables()
    report = asyncckpt.Loader(written / kind, tables, target).load()
    assert dict(report.metadata) == {"loss": 0.25, "who": ["a", None]} if kind == "full" else not report.metadata
    target["arrays"]["scalar"] = report.values["arrays.scalar"]  # Nothing that can be filled.
    for name in ("dtypes", "shapes", "tied", "arrays", "model", "optimizer", "schedule"):
        check_same(target[name], expected[name], name)
    check_tables(tables, 1)


@pytest.mark.parametrize("ranks_count", write.RANKS)
@pytest.mark.parametrize("kind", OF_RANKS)
def test_each_step_of_ranks_comes_back_on_any_number_of_ranks(written: Path, kind: str, ranks_count: int) -> None:
    check_steps(written / kind, int(kind[-1]), ranks_count)


def check_steps(path: str | Path, saved_count: int, ranks_count: int) -> None:
    assert asyncckpt.list_steps(path) == list(write.STEPS)
    for step in write.STEPS:
        found = asyncckpt.load(path, step, tables=True)
        for name in states.tables():
            check_rows(found[name], name, step)
        check_same(found["whole"], states.bits("whole", states.WHOLE, torch.float32, step))
        for rank in range(saved_count):
            check_same(found[f"own.{rank}"], states.bits(f"own.{rank}", (4,), torch.float64, step))
        for rank in range(ranks_count):
            tables, target = states.tables(rank, ranks_count), states.rank_state(rank, ranks_count, 9)
            wanted = {name: target[name] for name in ("whole", "replica", "step")}
            loader = asyncckpt.Loader(
                path, tables, wanted, shard_index=rank, shard_num=ranks_count, step=step, strict=False
            )
            assert loader.load().values["step"] == step
            check_tables(tables, step)
            expected = states.rank_state(rank, ranks_count, step)
            check_same(target["replica"], expected["replica"])
            check_same(target["whole"].pieces[0].tensor, expected["whole"].pieces[0].tensor)
