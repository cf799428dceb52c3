"""Tables of fixed rows: cut, load, and rows chosen by range."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import asyncckpt
from asyncckpt.adapters import FixedTable
from asyncckpt.errors import DeadlineError, IncompatibleError, UnsupportedError, UsageError
from asyncckpt.model.table import OwnsIds, Role
from asyncckpt.tables import table_lock
from tests.worlds.saves import save_one

DIM = 3


class FixedRows:
    """Some tensors of a module, and their table."""

    def __init__(self, begin: int = 0, end: int = 10, *, fill: float | None = None, ids_end: int | None = None) -> None:
        ids = torch.arange(begin, end)
        values = ids.float() if fill is None else torch.full((end - begin,), fill)
        self.embedding = values.unsqueeze(1) * torch.ones(DIM)
        self.momentum1 = values * 10
        self.table = FixedTable("t1", self.live, first_id=begin, ids_end=ids_end)

    def live(self) -> dict[str, torch.Tensor]:
        return {"embedding": self.embedding, "momentum1": self.momentum1}

    def values(self) -> list[float]:
        assert torch.equal(self.embedding[:, 0] * 10, self.momentum1)
        return self.embedding[:, 0].tolist()


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_lock, "TABLE_WAIT_S_MAX", 0.0)


def test_table_has_the_protocols() -> None:
    table = FixedRows(5, 9).table
    assert isinstance(table, asyncckpt.table.Table)
    assert isinstance(table, OwnsIds)
    assert (table.name, table.shard, len(table), table.first_id) == ("t1", (0, 1), 4, 5)
    assert repr(table) == "FixedTable('t1', ids [5, 9))"
    assert [(c.name, c.dtype, c.row_shape, c.role) for c in table.schema().columns] == [
        ("id", torch.int64, (), Role.ID),
        ("embedding", torch.float32, (DIM,), Role.WEIGHT),
        ("momentum1", torch.float32, (), Role.OPTIMIZER),
    ]


def test_cut_shows_the_live_memory() -> None:
    rows = FixedRows(5, 9)
    cut = rows.table.begin_cut()
    assert (cut.rows_count, cut.runs.tolist()) == (4, [[0, 4]])
    assert cut.column("embedding").data_ptr() == rows.embedding.data_ptr()
    assert cut.column("momentum1").data_ptr() == rows.momentum1.data_ptr()
    assert cut.column("id").tolist() == [5, 6, 7, 8]
    with pytest.raises(UsageError, match=r"table 't1' has no column 'x', expected \['id', 'embedding'"):
        cut.column("x")
    cut.fence()
    with pytest.raises(UsageError, match="column 'embedding' of a cut of table 't1' was asked for after its fence"):
        cut.column("embedding")
    assert rows.table.begin_cut().column("id") is rows.table.ids()


def test_a_parameter_is_shown_without_its_gradient() -> None:
    module = nn.Embedding(4, 2)
    column = FixedTable("t", lambda: {"embedding": module.weight}).begin_cut().column("embedding")
    assert not column.requires_grad
    assert column.data_ptr() == module.weight.data_ptr()


def test_a_table_without_rows() -> None:
    cut = FixedRows(3, 3).table.begin_cut()
    assert (cut.rows_count, cut.runs.shape, cut.runs.dtype) == (0, (0, 2), np.int64)


def on_another_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


@pytest.mark.usefixtures("no_patience")
def test_cuts_and_loads_exclude_each_other() -> None:
    table = FixedRows().table
    uses: list[Callable[[], object]] = [
        table.begin_cut,
        lambda: table.begin_load(clear=False, rows_count=0),
    ]
    cut = on_another_thread(table.begin_cut)
    for use in uses:
        with pytest.raises(DeadlineError, match=r"waited 0.0 s for cut of it"):
            use()
    cut.end(ok=False)
    load = on_another_thread(lambda: table.begin_load(clear=False, rows_count=0))
    cut.fence()  # A late second fence must not give back what the load holds.
    for use in uses:
        with pytest.raises(DeadlineError, match=r"waited 0.0 s for load of it"):
            use()
    load.end(ok=False)
    load.end(ok=False)
    table.begin_cut().fence()


def test_load_writes_the_live_memory() -> None:
    rows = FixedRows(5, 9, fill=0.0)
    load = rows.table.begin_load(clear=True, rows_count=4)
    found = load.insert(torch.tensor([8, 5]))
    assert (found.dtype, found.tolist()) == (torch.int64, [3, 0])
    load.column("embedding")[found] = 7.0
    assert load.column("id").tolist() == [5, 6, 7, 8]
    load.end(ok=True)
    assert rows.embedding[:, 0].tolist() == [7.0, 0.0, 0.0, 7.0]
    with pytest.raises(UsageError, match="insert of a load of table 't1' was asked for after its end"):
        load.insert(torch.tensor([5]))
    with pytest.raises(UsageError, match="column 'id' of a load of table 't1' was asked for after its end"):
        load.column("id")


@pytest.mark.parametrize("bad", [4, 9, -1, 2**62])
def test_ids_outside_of_the_range_are_refused(bad: int) -> None:
    load = FixedRows(5, 9).table.begin_load(clear=False, rows_count=2)
    message = rf"id {bad} does not belong to table 't1', expected an id of FixedTable\('t1', ids \[5, 9\)\)"
    with pytest.raises(UsageError, match=message):
        load.insert(torch.tensor([5, bad]))
    load.end(ok=False)


def test_ids_are_owned_by_range() -> None:
    ids = np.array([4, 5, 8, 9, -5, 2**63 - 1, -(2**63)], dtype=np.int64)
    assert FixedRows(5, 9).table.owned(ids).tolist() == [False, True, True, False, False, False, False]


def test_a_load_that_would_leave_rows_of_another_step_is_refused(tmp_path: Path) -> None:
    save_one(tmp_path, hashtables={"t": FixedRows(0, 6).table})
    target = FixedRows(0, 10, fill=-1.0)
    message = "the checkpoint holds too few of the rows of table 't1', which cannot be emptied, found 6, expected 10"
    with pytest.raises(IncompatibleError, match=message):
        asyncckpt.Loader(tmp_path, {"t": target.table}).load()
    assert target.values() == [-1.0] * 10
    asyncckpt.Loader(tmp_path, {"t": target.table}, merge=True).load()
    assert target.values() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, -1.0, -1.0, -1.0, -1.0]


@pytest.mark.parametrize("verify", [True, "before"])
def test_ranges_load_from_a_whole_and_a_whole_from_ranges(tmp_path: Path, verify: bool | str) -> None:
    whole = FixedRows(0, 11)
    save_one(tmp_path / "whole", staged=True, hashtables={"t": whole.table})
    parts = [FixedRows(0, 6, fill=-1.0, ids_end=11), FixedRows(6, 11, fill=-1.0)]
    for part in parts:
        report = asyncckpt.Loader(tmp_path / "whole", {"t": part.table}, verify=verify).load()  # type: ignore[arg-type]
        assert report.rows == {"t": len(part.table)}
    assert [*parts[0].values(), *parts[1].values()] == whole.values()
    tables, alone = {"a": parts[0].table, "b": parts[1].table}, asyncckpt.RankOptions(alone=True)
    save_one(tmp_path / "parts", staged=True, hashtables=tables, ranks=alone)
    target = FixedRows(0, 11, fill=-1.0)
    columns = ["id", "embedding", "momentum1"]
    both = {"t": {"a": columns, "b": columns}}
    asyncckpt.Loader(tmp_path / "parts", {"t": target.table}, filter_func=lambda info: both).load()
    assert target.values() == whole.values()


@pytest.mark.parametrize(("rows_count", "message"), [(4, "too few of the rows"), (11, "rows that table 't1' does not")])
def test_a_checkpoint_of_another_size_is_refused_before_any_change(
    tmp_path: Path, rows_count: int, message: str
) -> None:
    first = asyncckpt.HashTable("first", DIM)
    first.insert(torch.tensor([7]), torch.ones(1, DIM))
    save_one(tmp_path, hashtables={"first": first, "t": FixedRows(0, rows_count).table})
    first.insert(torch.tensor([8]), torch.ones(1, DIM))
    target = FixedRows(fill=-1.0)
    with pytest.raises(IncompatibleError, match=message):
        asyncckpt.Loader(tmp_path, {"first": first, "t": target.table}).load()
    assert sorted(first.ids().tolist()) == [7, 8]
    assert target.values() == [-1.0] * 10
    asyncckpt.Loader(tmp_path, {"first": first, "t": target.table}, merge=True).load()
    assert target.values()[: min(10, rows_count)] == list(range(min(10, rows_count)))


def test_columns_that_are_not_loaded_stay(tmp_path: Path) -> None:
    save_one(tmp_path, hashtables={"t": FixedRows().table})
    target = FixedRows(fill=-1.0)
    asyncckpt.Loader(tmp_path, {"t": target.table}, filter_func=lambda info: {"t": {"t": ["id", "embedding"]}}).load()
    assert target.embedding[:, 0].tolist() == list(range(10))
    assert target.momentum1.tolist() == [-10.0] * 10


def test_a_module_that_was_resized_is_refused(tmp_path: Path) -> None:
    rows = FixedRows()
    rows.embedding = torch.zeros(11, DIM)
    with pytest.raises(UsageError, match=r"columns of table 't1' do not fit its schema.*tables_of again"):
        rows.table.begin_cut()
    with pytest.raises(UsageError, match="columns of table 't1' do not fit"):
        rows.table.begin_load(clear=True, rows_count=11)
    rows.embedding = torch.zeros(10, DIM)  # New memory of the same form is read and written.
    cut = rows.table.begin_cut()
    assert cut.column("embedding").data_ptr() == rows.embedding.data_ptr()


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(UsageError, match="columns of table 't' do not fit"):
        FixedTable("t", lambda: {"embedding": torch.zeros(4, 2), "momentum1": torch.zeros(3)})


@pytest.mark.parametrize(
    ("name", "columns", "message"),
    [
        ("", {"embedding": torch.zeros(1, 1)}, "name of a table must be .*; got ''"),
        (None, {"embedding": torch.zeros(1, 1)}, "name of a table must be .*; got None"),
        ("t", {"weight": torch.zeros(1, 1)}, r"columns of table 't' must .*, found \['weight'\]"),
        ("t", {"embedding": torch.zeros(1, 1), "id": torch.zeros(1)}, "columns of table 't' must include"),
        ("t", {"embedding": np.zeros((1, 1))}, "column 'embedding' of table 't' must be .*; got a ndarray"),
    ],
)
def test_wrong_arguments_are_refused(name: Any, columns: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FixedTable(name, lambda: columns)


class NotPlain(torch.Tensor):
    """A tensor that is not what it seems to be in memory, as a DTensor."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(3, 2, device="meta"),
        torch.eye(3).to_sparse(),
        torch.tensor(1.0),
        torch.zeros(3, 2).as_subclass(NotPlain),
    ],
    ids=["meta", "sparse", "scalar", "subclass"],
)
def test_tensors_without_rows_in_memory_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError, match="column 'embedding' of table 't'"):
        FixedTable("t", lambda: {"embedding": tensor})
