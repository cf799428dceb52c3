"""Column specs: what they mean, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncckpt.errors import UnsupportedError, UsageError
from asyncckpt.model.table import Column, Role
from asyncckpt.tables import HashTable, Slot


def test_schema_lists_columns_in_order() -> None:
    table = HashTable(
        "user",
        8,
        dtype=torch.float16,
        optimizer_slots={"sum": torch.float32, "scale": (), "parts": (torch.float64, (2, 3))},
        metadata={"step_filter": torch.int64, "flag": Slot(torch.bool, (2,), 1)},
    )
    assert table.schema().columns == (
        Column("id", torch.int64, (), Role.ID),
        Column("embedding", torch.float16, (8,), Role.WEIGHT),
        Column("sum", torch.float32, (8,), Role.OPTIMIZER),
        Column("scale", torch.float16, (), Role.OPTIMIZER),
        Column("parts", torch.float64, (2, 3), Role.OPTIMIZER),
        Column("step_filter", torch.int64, (), Role.METADATA),
        Column("flag", torch.bool, (2,), Role.METADATA),
    )
    rows = table.lookup(torch.tensor([3, 4]))
    assert table.slot("flag")[rows].all()
    assert table.slot("parts")[rows].tolist() == torch.zeros(2, 2, 3).tolist()


def test_torch_size_is_a_row_shape() -> None:
    table = HashTable("user", 8, optimizer_slots={"sum": torch.Size([4])})
    column = table.schema().column("sum")
    assert column is not None
    assert type(column.row_shape) is tuple
    assert column.row_shape == (4,)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_integer_fill_is_exact(dtype: torch.dtype) -> None:
    high = torch.iinfo(dtype).max
    table = HashTable("user", 1, metadata={"mark": Slot(dtype, (), high)})
    table.lookup(torch.arange(10))
    table.remove(torch.tensor([3, 5]))
    rows = table.lookup(torch.arange(10))
    assert table.slot("mark")[rows].tolist() == [high] * 10


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ({"": torch.float32}, "name of a column for metadata must be .*; got ''"),
        ({1: torch.float32}, "must be a non-empty str; got 1"),
        ({"a@b": torch.float32}, "holds '@', found 'a@b'"),
        ({"id": torch.float32}, "is reserved, found 'id'"),
        ({"embedding": torch.float32}, "is reserved, found 'embedding'"),
        ({"seen": torch.float32}, "is taken by another column of the table, found 'seen'"),
        ({"sum": None}, "spec of column 'sum' must be .*; got None"),
        ({"sum": [4]}, "spec of column 'sum' must be"),
        ({"sum": (0,)}, r"row shape of column 'sum' must be .*; got \(0,\)"),
        ({"sum": (torch.float32, 4)}, "row shape of column 'sum' must be .*; got 4"),
        ({"sum": (torch.float32, (4,), 0.0)}, "row shape of column 'sum' must be"),
        ({"sum": (torch.float32, (True,))}, "row shape of column 'sum' must be"),
        ({"sum": Slot(torch.float32, [4])}, "row shape of column 'sum' must be"),  # type: ignore[arg-type]
        ({"sum": Slot("float32", ())}, "dtype of column 'sum' must be .*; got 'float32'"),  # type: ignore[arg-type]
        ({"sum": Slot(torch.float32, (), "0")}, "fill of column 'sum' must be .*; got '0'"),  # type: ignore[arg-type]
        ({"sum": Slot(torch.int8, (), 128)}, "fill of column 'sum' does not fit torch.int8, found 128"),
        ({"sum": Slot(torch.int64, (), 0.5)}, "does not fit torch.int64"),
        ({"sum": Slot(torch.int64, (), float("nan"))}, "does not fit torch.int64"),
        ({"sum": Slot(torch.bool, (), 2)}, "does not fit torch.bool"),
        ([("sum", torch.float32)], "must be a mapping of name to spec"),
    ],
)
def test_wrong_slots_are_refused(slots: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        HashTable("user", 4, metadata=slots, optimizer_slots={"seen": ()})


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_weight_dtype_is_floating_point(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match="dtype of a table is not supported"):
        HashTable("user", 4, dtype=dtype)
    with pytest.raises(UsageError, match=r"dtype of a table must be .*; got 'float32'"):
        HashTable("user", 4, dtype="float32")  # type: ignore[arg-type]


def test_complex_slot_is_not_supported() -> None:
    with pytest.raises(UnsupportedError, match=r"dtype of column 'sum' is not supported, found torch\.complex64"):
        HashTable("user", 4, optimizer_slots={"sum": torch.complex64})
