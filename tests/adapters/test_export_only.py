"""Tables that can only be exported: the copy of a cut, the rows that a load gathers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from asyncckpt.adapters.export_only import ExportOnlyTable, Rows, split_columns
from asyncckpt.errors import UnsupportedError, UsageError
from asyncckpt.model.table import Column, Role, TableSchema

SCHEMA = TableSchema(
    columns=(
        Column(name="id", dtype=torch.int64, row_shape=(), role=Role.ID),
        Column(name="embedding", dtype=torch.float32, row_shape=(2,), role=Role.WEIGHT),
        Column(name="count", dtype=torch.int16, row_shape=(), role=Role.METADATA),
    )
)


class WrittenRows(ExportOnlyTable):
    """Its memory is the rows that were written last."""

    def __init__(self) -> None:
        super().__init__("plain", SCHEMA)
        self.fails = False
        self.rows: Rows = {
            "id": torch.tensor([5, -6]),
            "embedding": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
            "count": torch.tensor([1, 2], dtype=torch.int16),
        }

    def _export(self) -> Rows:
        return {name: column.clone() for name, column in self.rows.items()}

    def _replace(self, rows: Rows) -> None:
        if self.fails:
            raise RuntimeError("full")
        self.rows = rows

    def _first_value(self, column: str) -> float:
        return 9.0

    def _check_ids(self, ids: np.ndarray) -> None:
        if (ids == 0).any():
            raise UnsupportedError("no zero")


def test_cut_is_a_copy_until_the_fence() -> None:
    table = WrittenRows()
    cut = table.begin_cut()
    table.rows["embedding"].zero_()
    assert (cut.rows_count, cut.runs.tolist()) == (2, [[0, 2]])
    assert cut.column("embedding").tolist() == [[1, 2], [3, 4]]
    with pytest.raises(UsageError, match=r"no column 'age', expected \['id', 'embedding', 'count'\]"):
        cut.column("age")
    cut.fence()
    with pytest.raises(UsageError, match="column 'id' of a cut of table 'plain' was asked for after its fence"):
        cut.column("id")


def test_load_changes_nothing_before_its_end() -> None:
    table = WrittenRows()
    load = table.begin_load(clear=True, rows_count=1, filled=())
    rows = load.insert(torch.tensor([7, 5, 7]))
    assert rows.tolist() == [0, 1, 0]
    assert load.column("id").tolist() == [7, 5]
    load.column("embedding")[rows] = 0.5
    assert table.rows["id"].tolist() == [5, -6]
    load.end(True)
    assert table.rows["id"].tolist() == [7, 5]
    assert table.rows["embedding"].tolist() == [[0.5, 0.5]] * 2
    assert table.rows["count"].tolist() == [9, 9]


def test_load_that_failed_leaves_the_table_as_it_was() -> None:
    table = WrittenRows()
    load = table.begin_load(clear=True, rows_count=0, filled=("embedding",))
    load.insert(torch.arange(1, 400))
    load.end(False)
    load.end(True)
    assert table.rows["id"].tolist() == [5, -6]
    for use in (lambda: load.insert(torch.tensor([1])), lambda: load.column("count")):
        with pytest.raises(UsageError, match="of a load of table 'plain' was asked for after its end"):
            use()


def test_merge_keeps_what_is_not_loaded() -> None:
    table = WrittenRows()
    load = table.begin_load(clear=False, rows_count=1, filled=("embedding",))
    rows = load.insert(torch.tensor([-6, 8]))
    load.column("embedding")[rows] = 0.0
    load.end(True)
    assert table.rows["id"].tolist() == [5, -6, 8]
    assert table.rows["embedding"].tolist() == [[1, 2], [0, 0], [0, 0]]
    assert table.rows["count"].tolist() == [1, 2, 9]


def test_error_of_writing_reaches_the_caller() -> None:
    table = WrittenRows()
    table.fails = True
    load = table.begin_load(clear=True, rows_count=0, filled=())
    with pytest.raises(RuntimeError, match="full"):
        load.end(True)
    load.end(True)


def test_ids_and_columns_are_checked() -> None:
    load = WrittenRows().begin_load(clear=True, rows_count=3, filled=())
    with pytest.raises(UnsupportedError, match="no zero"):
        load.insert(torch.tensor([1, 0]))
    with pytest.raises(UsageError, match="ids for table 'plain' have the wrong dtype"):
        load.insert(torch.tensor([1.0]))
    with pytest.raises(UsageError, match="table 'plain' has no column 'age'"):
        load.column("age")
    assert load.column("id").tolist() == []


def test_value_rows_are_split_in_the_order_of_the_schema() -> None:
    values = torch.arange(6.0).reshape(2, 3)
    found = split_columns(values, SCHEMA, ("count", "embedding"))
    assert found["embedding"].tolist() == [[0, 1], [3, 4]]
    assert found["count"].tolist() == [2, 5]
    values.zero_()
    assert found["embedding"].tolist() == [[0, 1], [3, 4]]
    assert found["embedding"].is_contiguous()


def test_a_library_is_called_with_its_device_current(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[object] = []

    @contextmanager
    def make_current(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    class OnDevice(WrittenRows):
        def _export(self) -> Rows:
            assert current == [torch.device("cuda", 1)]
            return super()._export()

        def _replace(self, rows: Rows) -> None:
            assert current == [torch.device("cuda", 1)]
            super()._replace(rows)

    monkeypatch.setattr(torch.cuda, "device", make_current)
    table = OnDevice()
    table._library_device = torch.device("cuda", 1)
    table.begin_cut().end(True)
    load = table.begin_load(clear=False, rows_count=1, filled=())
    load.insert(torch.tensor([7]))
    load.end(True)
    assert len(table.rows["id"]) == 3
    assert current == []
