"""`cast=True`: targets of other dtypes are filled, where the numbers keep their values but for rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.snapshot import windows
from tests.end_to_end.trees import differences
from tests.worlds.saves import save_one

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


def saved(path: Path, state: dict[str, Any]) -> Path:
    save_one(path, tensors=state)
    return path


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("wanted", FLOATS)
@pytest.mark.parametrize("stored", FLOATS)
def test_floats_are_rounded_to_the_nearest(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, verify: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(40, 6, generator=generator).to(stored)
    state = {"all": values, "one": values[0, 0].clone(), "none": values[:0], "strided": values.t()}
    path = saved(tmp_path / "d", state)
    targets = {name: torch.empty_strided(item.shape, item.stride(), dtype=wanted) for name, item in state.items()}
    asyncckpt.Loader(path, tensors=targets, cast=True, verify=verify).load()
    assert list(differences(targets, {name: item.to(wanted) for name, item in state.items()})) == []


def test_a_model_in_another_precision(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))
    asyncckpt.save(tmp_path / "d", {"model": model})
    half = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20)).to(torch.bfloat16)
    with pytest.raises(asyncckpt.IncompatibleError, match=r"dtype torch\.bfloat16, the checkpoint.*cast=True"):
        asyncckpt.Loader(tmp_path / "d", tensors={"model": half}).load()
    asyncckpt.Loader(tmp_path / "d", tensors={"model": half}, cast=True).load_async().result(60)
    assert list(differences(dict(half.state_dict()), dict(model.to(torch.bfloat16).state_dict()))) == []


def test_integers_go_where_they_all_fit(tmp_path: Path) -> None:
    state = {"a": torch.tensor([-128, 127], dtype=torch.int8), "b": torch.tensor([0, 255], dtype=torch.uint8)}
    path = saved(tmp_path / "d", state)
    for wanted in (torch.int16, torch.int32, torch.int64):
        targets = {name: torch.zeros(2, dtype=wanted) for name in state}
        asyncckpt.Loader(path, tensors=targets, cast=True).load()
        assert list(differences(targets, {name: item.to(wanted) for name, item in state.items()})) == []


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.int64, torch.int32),
        (torch.int8, torch.uint8),
        (torch.uint8, torch.int8),
        (torch.int32, torch.float64),
        (torch.float32, torch.int64),
        (torch.bool, torch.int32),
        (torch.int32, torch.bool),
        (torch.float32, torch.complex64),
        (torch.complex64, torch.float32),
        (torch.complex64, torch.complex128),
    ],
)
def test_what_would_change_values_is_refused(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    path = saved(tmp_path / "d", {"x": torch.ones(3, dtype=stored)})
    target = torch.zeros(3, dtype=wanted)
    with pytest.raises(asyncckpt.IncompatibleError, match=r"nothing was changed: .*which cannot be cast to it"):
        asyncckpt.Loader(path, tensors={"x": target}, cast=True).load()
    with pytest.raises(asyncckpt.IncompatibleError) as caught:
        asyncckpt.Loader(path, tensors={"x": target}).load()
    assert "cast=True" not in str(caught.value)
    assert not target.any()


def test_a_large_tensor_is_cast_window_by_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 1 << 12)
    values = torch.arange(100_000.0).reshape(1000, 100)
    path = saved(tmp_path / "d", {"x": values})
    target = torch.zeros(1000, 100, dtype=torch.float64)
    report = asyncckpt.Loader(path, tensors={"x": target}, cast=True).load()
    assert torch.equal(target, values.double())
    assert report.bytes_read == values.nbytes


@pytest.mark.parametrize("rows", [0, 1, 300])
def test_tables_are_cast_too(tmp_path: Path, rows: int) -> None:
    table = asyncckpt.HashTable("user", 4, optimizer_slots={"sum": ()}, metadata={"count": torch.int32})
    ids = torch.arange(rows) * 7
    table.insert(ids, torch.randn(rows, 4), sum=torch.randn(rows), count=torch.arange(rows, dtype=torch.int32))
    save_one(tmp_path / "d", hashtables={"user": table})
    for shard in ((0, 1), (1, 3)):
        other = asyncckpt.HashTable(
            "user",
            4,
            dtype=torch.bfloat16,
            optimizer_slots={"sum": ()},
            metadata={"count": torch.int64},
            shard=shard,
        )
        with pytest.raises(asyncckpt.IncompatibleError, match=r"column 'embedding' of table 'user'.*cast=True"):
            asyncckpt.Loader(tmp_path / "d", {"user": other}).load()
        asyncckpt.Loader(tmp_path / "d", {"user": other}, cast=True).load()
        mine = ids[ids % shard[1] == shard[0]]
        found, was = other.read(mine), table.read(mine)
        assert len(other) == len(mine)
        assert torch.equal(found["embedding"], was["embedding"].to(torch.bfloat16))
        assert torch.equal(found["count"], was["count"].to(torch.int64))


def test_cast_is_true_or_false(tmp_path: Path) -> None:
    with pytest.raises(asyncckpt.UsageError, match="cast"):
        asyncckpt.Loader(tmp_path, cast=torch.bfloat16)  # type: ignore[arg-type]
