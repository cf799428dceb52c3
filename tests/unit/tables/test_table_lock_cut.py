"""A table held still for a save, and filled by a load."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from asyncckpt.errors import DeadlineError, UsageError
from asyncckpt.tables import HashTable, table_lock
from tests.worlds.threads import in_thread


@pytest.fixture
def table() -> HashTable:
    table = HashTable("user", 2, optimizer_slots={"sum": ()}, capacity=4, initializer=0.5)
    ids = torch.arange(10, 20)
    table.insert(ids, ids.unsqueeze(1).expand(-1, 2).float(), sum=ids.float())
    return table


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_lock, "TABLE_WAIT_S_MAX", 0.0)


def test_runs_are_the_used_rows_after_removals(table: HashTable) -> None:
    table.remove(torch.tensor([10, 13, 14, 19]))
    cut = table.begin_cut()
    assert cut.rows_count == 6
    assert cut.runs.tolist() == [[1, 3], [5, 9]]
    ids = torch.cat([cut.column("id")[begin:end] for begin, end in cut.runs])
    sums = torch.cat([cut.column("sum")[begin:end] for begin, end in cut.runs])
    assert ids.tolist() == [11, 12, 15, 16, 17, 18]
    assert sums.tolist() == ids.tolist()
    cut.fence()
    assert torch.equal(ids, table.ids())


def test_cut_columns_are_the_live_memory(table: HashTable) -> None:
    cut = table.begin_cut()
    assert cut.column("embedding").data_ptr() == table.embedding.data_ptr()
    assert cut.column("id").data_ptr() == cut.column("id").data_ptr()
    assert cut.column("id").dtype is torch.int64
    assert all(cut.column(name).is_contiguous() and len(cut.column(name)) >= 10 for name in ("id", "embedding", "sum"))
    cut.fence()


def test_cut_of_an_empty_table() -> None:
    cut = HashTable("user", 2).begin_cut()
    assert (cut.rows_count, cut.runs.shape) == (0, (0, 2))
    assert cut.runs.dtype == np.int64
    assert cut.column("id").shape == (0,)
    cut.end(ok=True)


@pytest.mark.usefixtures("no_patience")
def test_cut_holds_the_table_until_its_fence(table: HashTable) -> None:
    cut = in_thread(table.begin_cut)
    uses: list[Callable[[], object]] = [
        lambda: table.lookup(torch.tensor([1])),
        lambda: table.insert(torch.tensor([1]), torch.ones(1, 2)),
        lambda: table.remove(torch.tensor([10])),
        table.clear,
        table.ids,
        table.begin_cut,
        lambda: table.begin_load(clear=True, rows_count=0),
    ]
    for use in uses:
        with pytest.raises(DeadlineError, match=r"of table 'user' waited 0.0 s for cut of it \(a cut holds its table"):
            use()
    assert len(table) == 10
    cut.fence()
    assert table.lookup(torch.tensor([1])).tolist() == [10]


def test_the_thread_of_a_cut_is_refused_at_once(table: HashTable) -> None:
    """It would wait for itself."""
    cut = table.begin_cut()
    with pytest.raises(UsageError, match="lookup of table 'user' waits for cut of it on the same thread"):
        table.lookup(torch.tensor([1]))
    cut.fence()
    load = table.begin_load(clear=True, rows_count=0)
    with pytest.raises(UsageError, match="cut of table 'user' waits for load of it on the same thread"):
        table.begin_cut()
    load.end(ok=True)
    assert table.lookup(torch.tensor([1])).tolist() == [0]


@pytest.mark.usefixtures("no_patience")
def test_fence_may_come_from_another_thread(table: HashTable) -> None:
    cut = table.begin_cut()
    in_thread(cut.fence)
    table.lookup(torch.tensor([1]))
    in_thread(lambda: cut.end(ok=True))
    table.lookup(torch.tensor([2]))


def test_waiting_use_goes_on_after_the_fence(table: HashTable) -> None:
    cut = table.begin_cut()
    rows: list[int] = []
    thread = threading.Thread(target=lambda: rows.extend(table.lookup(torch.tensor([1])).tolist()))
    thread.start()
    assert len(table) == 10
    cut.fence()
    thread.join()
    assert rows == [10]


@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize("ok", [True, False])
def test_end_without_fence_gives_the_table_back_once(table: HashTable, ok: bool) -> None:
    cut = table.begin_cut()
    cut.end(ok=ok)
    second = in_thread(table.begin_cut)
    cut.end(ok=ok)
    cut.fence()
    with pytest.raises(DeadlineError):
        table.clear()
    second.fence()


def test_column_after_the_fence_is_refused(table: HashTable) -> None:
    cut = table.begin_cut()
    with pytest.raises(UsageError, match=r"no column 'momentum', expected \['id', 'embedding', 'sum'\]"):
        cut.column("momentum")
    cut.fence()
    with pytest.raises(UsageError, match="column 'sum' of a cut of table 'user' was asked for after its fence"):
        cut.column("sum")


def test_load_fills_an_emptied_table(table: HashTable) -> None:
    load = table.begin_load(clear=True, rows_count=100)
    assert table.capacity >= 100
    ids = torch.tensor([5, -7, 5, 12])
    rows = load.insert(ids)
    assert rows.dtype is torch.int64
    assert rows[0] == rows[2]
    load.column("sum")[rows] = ids.float()
    assert load.column("id")[rows].tolist() == ids.tolist()
    load.end(ok=True)
    assert sorted(table.ids().tolist()) == [-7, 5, 12]
    assert table.slot("sum")[table.lookup(ids)].tolist() == ids.tolist()
    assert table.embedding[table.lookup(ids)].tolist() == [[0.5, 0.5]] * 4


def test_load_without_clear_keeps_other_rows(table: HashTable) -> None:
    load = table.begin_load(clear=False, rows_count=1)
    load.column("embedding")[load.insert(torch.tensor([10, 99]))] = -1.0
    load.end(ok=True)
    assert table.embedding[table.lookup(torch.tensor([10, 11, 99]))].tolist() == [[-1.0] * 2, [11.0] * 2, [-1.0] * 2]
    assert len(table) == 11


def test_reserved_rows_do_not_grow(table: HashTable) -> None:
    load = table.begin_load(clear=True, rows_count=5000)
    embedding = load.column("embedding")
    for begin in range(0, 5000, 500):
        load.insert(torch.arange(begin, begin + 500))
    assert load.column("embedding").data_ptr() == embedding.data_ptr()
    load.end(ok=True)
    assert len(table) == 5000


@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize("clear", [True, False])
def test_failed_load_leaves_the_table_empty(table: HashTable, clear: bool) -> None:
    load = in_thread(lambda: table.begin_load(clear=clear, rows_count=10))
    load.insert(torch.tensor([1, 2]))
    with pytest.raises(DeadlineError, match=r"lookup of table 'user' waited 0.0 s for load of it"):
        table.lookup(torch.tensor([1]))
    in_thread(lambda: load.end(ok=False))
    assert len(table) == 0
    assert table.ids().tolist() == []
    load.end(ok=False)
    assert table.lookup(torch.tensor([1])).tolist() == [0]
    assert len(table) == 1


def test_load_after_its_end_is_refused(table: HashTable) -> None:
    load = table.begin_load(clear=False, rows_count=0)
    load.end(ok=True)
    with pytest.raises(UsageError, match="insert of a load of table 'user' was asked for after its end"):
        load.insert(torch.tensor([1]))
    with pytest.raises(UsageError, match="column 'sum' of a load of table 'user' was asked for after its end"):
        load.column("sum")
    load.end(ok=False)
    assert len(table) == 10


@pytest.mark.parametrize("rows_count", [-1, 1.0, True, None])
def test_load_refuses_a_wrong_rows_count(table: HashTable, rows_count: int) -> None:
    with pytest.raises(UsageError, match="rows_count of a load of table 'user' must be"):
        table.begin_load(clear=True, rows_count=rows_count)
    assert len(table) == 10


@pytest.mark.usefixtures("no_patience")
def test_failed_begin_gives_the_table_back(table: HashTable, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("asyncckpt.tables.row_store.RowStore.runs", fail)
        patch.setattr("asyncckpt.tables.row_store.RowStore.reserve", fail)
        with pytest.raises(MemoryError):
            table.begin_cut()
        with pytest.raises(MemoryError):
            table.begin_load(clear=False, rows_count=1)
    assert len(table.ids()) == 10
