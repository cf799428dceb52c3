"""Two checkpoints compared, and rows found by id: the same as loading them and looking, however they were saved."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.engine.inspect import compare as compared
from asyncckpt.engine.inspect import stored_values
from asyncckpt.errors import NotFoundError, UsageError
from asyncckpt.format.dtypes import supported_dtypes
from asyncckpt.inspection import compare, find_rows, outline
from tests.end_to_end.merged_ranks import as_boxes, save_each
from tests.worlds.saves import save_one


@pytest.fixture(params=[4 << 20, 64])
def window_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows as they are, and such that everything takes several."""
    for module in (stored_values, compared):
        monkeypatch.setattr(module, "WINDOW_BYTES", request.param)


def rows_of(path: Path, step: int, name: str) -> dict[int, tuple[bytes, ...]]:
    """Return the rows of a table as they load, by id."""
    columns = asyncckpt.load(path, step, tables=[name])[name]
    others = [columns[column] for column in columns if column != "id"]
    return {id: tuple(own[row].numpy().tobytes() for own in others) for row, id in enumerate(columns["id"].tolist())}


def expected_change(before: dict[int, Any], after: dict[int, Any]) -> tuple[set[int], set[int], set[int]]:
    both = before.keys() & after.keys()
    return after.keys() - both, before.keys() - both, {id for id in both if before[id] != after[id]}


@pytest.mark.parametrize("seed", range(6))
def test_tables_differ_as_their_rows_do(tmp_path: Path, seed: int, window_bytes: None) -> None:
    """Deltas, full checkpoints and a compacted one, each with each."""
    choose = random.Random(seed)
    table = asyncckpt.HashTable("user", 3, optimizer_slots={"sum": torch.float32})
    policy = asyncckpt.DeltaPolicy(bytes_share_max=100.0)
    with asyncckpt.Saver(path=tmp_path, hashtables={"user": table}, deltas=policy) as saver:
        for step in range(5):
            table.lookup(torch.tensor([choose.randrange(-30, 30) for _ in range(12)]))
            ids = table.ids()[: step + 1]
            values = table.read(ids)
            table.insert(ids, values["embedding"] + 0.5, sum=values["sum"])
            table.remove(torch.tensor([choose.randrange(-30, 30) for _ in range(4)]))
            saver.save_async(step, kind="full" if step == choose.randrange(5) else "auto").result(60)
    asyncckpt.compact(tmp_path, 3)
    held = {step: rows_of(tmp_path, step, "user") for step in range(5)}
    for first in range(5):
        for second in range(5):
            added, removed, changed = expected_change(held[first], held[second])
            found = compare(tmp_path, first, second)
            assert found.is_same == (not (added or removed or changed))
            if found.is_same:
                continue
            table_change = found.tables["user"]
            assert set(table_change.added.tolist()) == added
            assert set(table_change.removed.tolist()) == removed
            assert set(table_change.changed.tolist()) == changed
            assert (table_change.rows_before, table_change.rows_after) == (len(held[first]), len(held[second]))
    for step, rows in held.items():
        asked = [*range(-30, 30)]
        choose.shuffle(asked)
        found_rows = find_rows(tmp_path, "user", asked, step)
        assert found_rows.ids.tolist() == [id for id in asked if id in rows]
        assert found_rows.missing.tolist() == sorted(set(asked) - rows.keys())
        columns = [found_rows.columns[name] for name in ("embedding", "sum")]
        for index, id in enumerate(found_rows.ids.tolist()):
            assert tuple(own[index].numpy().tobytes() for own in columns) == rows[id]


def test_how_far_numbers_are_apart(tmp_path: Path, window_bytes: None) -> None:
    before, after = torch.randn(70, 3), torch.randn(70, 3)
    save_one(tmp_path, tensors={"w": before, "same": torch.ones(9), "zero": torch.zeros(2)})
    save_one(tmp_path, 2, tensors={"w": after, "same": torch.ones(9), "zero": torch.ones(2)})
    found = compare(tmp_path, 1, 2).tensors
    assert sorted(found) == ["w", "zero"]
    assert found["w"].kind == "changed"
    assert found["w"].before == found["w"].after == "float32 [70, 3]"
    assert found["w"].max_abs == (before.double() - after.double()).abs().max().item()
    cosine = torch.nn.functional.cosine_similarity(before.double().ravel(), after.double().ravel(), dim=0).item()
    assert found["w"].cosine == pytest.approx(cosine)
    assert (found["zero"].max_abs, found["zero"].cosine) == (1.0, None)


def test_tensors_come_go_and_change_their_form(tmp_path: Path) -> None:
    first = {
        "gone": torch.ones(2),
        "grown": torch.ones(2),
        "cast": torch.ones(2),
        "nan": torch.tensor([1.0, float("nan")]),
    }
    second = {
        "new": torch.ones(2),
        "grown": torch.ones(3),
        "cast": torch.ones(2).half(),
        "nan": torch.tensor([1.0, float("nan")]),
    }
    asyncckpt.save(tmp_path / "a", {**first, "lr": 0.1, "epoch": 1}, metadata={"loss": 1.0})
    asyncckpt.save(tmp_path / "b", {**second, "lr": 0.1, "best": float("nan")}, metadata={"loss": 2.0})
    found = compare(tmp_path / "a", None, None, other_path=tmp_path / "b")
    assert {name: (change.kind, change.before, change.after) for name, change in found.tensors.items()} == {
        "gone": ("removed", "float32 [2]", None),
        "grown": ("changed", "float32 [2]", "float32 [3]"),
        "cast": ("changed", "float32 [2]", "float16 [2]"),
        "new": ("added", None, "float32 [2]"),
    }
    assert found.values.keys() == {"epoch", "best"}
    assert found.values["epoch"] == ((1,), ())
    assert found.metadata == {"loss": ((1.0,), (2.0,))}
    assert compare(tmp_path / "b", 0, 0).is_same


@pytest.mark.parametrize("dtype", supported_dtypes(), ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype, window_bytes: None) -> None:
    raw = torch.arange(96, dtype=torch.uint8).reshape(6, 16)
    if dtype is torch.bool:
        raw = raw % 2
    other = raw.clone()
    other[3, 0] ^= 1
    save_one(tmp_path, tensors={"x": raw.view(dtype), "one": raw.view(dtype)[0, 0]})
    save_one(tmp_path, 2, tensors={"x": other.view(dtype), "one": other.view(dtype)[3, 0]})
    found = compare(tmp_path, 1, 2)
    assert sorted(found.tensors) == ["one", "x"]
    assert compare(tmp_path, 2, 2).is_same


def test_a_nan_that_comes_is_seen(tmp_path: Path) -> None:
    for step, value in ((1, 1.0), (2, float("nan"))):
        asyncckpt.save(tmp_path, {"x": torch.tensor([0.0, value])}, step)
    found = compare(tmp_path, 1, 2).tensors["x"]
    assert found.max_abs is not None
    assert np.isnan(found.max_abs)


def test_ranks_that_cut_a_tensor_in_other_ways_hold_the_same(tmp_path: Path, window_bytes: None) -> None:
    whole = torch.arange(30.0).reshape(5, 6)
    by_rows = {(0, "w"): ((0, 0), (5, 6)), (1, "w"): ((2, 0), (5, 6))}
    by_columns = {(0, "w"): ((0, 0), (5, 6)), (1, "w"): ((0, 4), (5, 6))}
    rows = save_each(tmp_path / "r", [{"w": whole[:2]}, {"w": whole[2:]}], change=as_boxes(by_rows))
    columns = save_each(
        tmp_path / "c",
        [{"w": whole[:, :4].contiguous()}, {"w": whole[:, 4:].contiguous()}],
        change=as_boxes(by_columns),
    )
    assert compare(rows, None, None, other_path=columns).is_same
    whole[4, 5] += 2
    asyncckpt.save(tmp_path / "whole", {"w": whole})
    found = compare(columns, None, None, other_path=tmp_path / "whole").tensors["w"]
    assert (found.kind, found.max_abs) == ("changed", 2.0)


def test_encoded_columns_are_compared_as_they_load(tmp_path: Path, window_bytes: None) -> None:
    rules = [asyncckpt.filters.compress(), asyncckpt.filters.cast("user@embedding", torch.float16)]
    for number, rule in enumerate(rules):
        path = tmp_path / str(number)
        table = asyncckpt.HashTable("user", 4)
        table.insert(torch.arange(40), torch.ones(40, 4))
        with asyncckpt.Saver(path=path, hashtables={"user": table}, filters=[rule]) as saver:
            saver.save(1)
            table.insert(torch.tensor([7]), torch.full((1, 4), 2.0))
            saver.save(2)
        assert any(block.encoding for block in asyncckpt.describe(path).blocks)
        change = compare(path, 1, 2).tables["user"]
        assert change.changed.tolist() == [7]
        found = find_rows(path, "user", [7, 3], 2)
        held = rows_of(path, 2, "user")
        assert [row.numpy().tobytes() for row in found.columns["embedding"]] == [held[7][0], held[3][0]]


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"x": torch.ones(1)})
    with pytest.raises(NotFoundError, match="no table 'user'"):
        find_rows(tmp_path, "user", [1])
    with pytest.raises(UsageError, match="ids"):
        find_rows(tmp_path, "user", [1 << 63])


def test_the_outline_is_the_tree_that_was_saved(tmp_path: Path) -> None:
    linear = torch.nn.Linear(3, 2)
    state = {"model": linear, "by_id": {7: (1, "two")}, "array": np.zeros(4, dtype=np.int16), "none": None, "empty": []}
    table = asyncckpt.HashTable("user", 4)
    table.lookup(torch.arange(5))
    asyncckpt.save(tmp_path, state, hashtables={"user": table})
    entries = {entry.path: entry for entry in outline(tmp_path).entries}
    assert [(path, entry.kind) for path, entry in entries.items()] == [
        (("model",), "object"),
        (("model", "weight"), "tensor"),
        (("model", "bias"), "tensor"),
        (("by_id",), "dict"),
        (("by_id", 7), "tuple"),
        (("by_id", 7, 0), "value"),
        (("by_id", 7, 1), "value"),
        (("array",), "array"),
        (("none",), "value"),
        (("empty",), "list"),
        (("user",), "table"),
        (("user", "id"), "column"),
        (("user", "embedding"), "column"),
    ]
    assert (entries["model", "weight"].dtype, entries["model", "weight"].shape) == ("float32", (2, 3))
    assert entries["by_id", 7, 1].value == "two"
    assert entries["user",].count == 5
    assert entries["user", "embedding"].shape == (4,)
