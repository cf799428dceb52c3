"""HashTable against a dict: rows, values, growth, rebirth, removal, and every wrong argument."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from asyncckpt.errors import UsageError
from asyncckpt.model.table import Table
from asyncckpt.tables import HashTable, Slot, Uniform
from asyncckpt.tables.row_device import RowDevice
from tests.worlds.rows import batch
from tests.worlds.table_beside_dict import TableBesideDict

DIM = 3
INITIALIZER = Uniform(0.5, seed=7)
SUM_FILL = 0.25

IDS = st.one_of(st.integers(-6, 6), st.sampled_from([-(2**63), 2**63 - 1, 2**62, -(2**40)]))
BATCHES = st.lists(IDS, max_size=12)


def new_table(**options: Any) -> HashTable:
    return HashTable(
        "user",
        DIM,
        optimizer_slots={"sum": Slot(torch.float32, (), SUM_FILL)},
        metadata={"step_filter": torch.int64},
        **{"capacity": 1, "initializer": INITIALIZER, **options},
    )


def first_row(id: int) -> list[float]:
    row: list[float] = INITIALIZER.rows(np.array([id], dtype=np.int64), dim=DIM)[0].tolist()
    return row


class DictModel(RuleBasedStateMachine):
    """The table does what a dict of id -> (embedding, sum, step) does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = new_table()
        self.model: dict[int, tuple[list[float], float, int]] = {}
        self.both = TableBesideDict(self.table, self.model)
        self.writes_count = 0

    def expect_present(self, ids: list[int]) -> None:
        for id in ids:
            self.model.setdefault(id, (first_row(id), SUM_FILL, 0))

    @rule(ids=BATCHES)
    def lookup_inserts(self, ids: list[int]) -> None:
        rows_before = {id: int(self.table.lookup(batch([id]), insert=False)) for id in self.model}
        self.table.lookup(batch(ids))
        self.expect_present(ids)
        rows_after = {id: int(self.table.lookup(batch([id]), insert=False)) for id in rows_before}
        assert rows_after == rows_before

    @rule(ids=BATCHES)
    def lookup_finds(self, ids: list[int]) -> None:
        self.both.find(ids)

    @rule(ids=BATCHES, with_sum=st.booleans())
    def insert(self, ids: list[int], with_sum: bool) -> None:
        self.expect_present(ids)
        values = [float(self.writes_count + place) for place in range(len(ids))]
        self.writes_count += len(ids)
        rows = torch.tensor(values).reshape(-1, 1).expand(-1, DIM)
        self.table.insert(batch(ids), rows, **({"sum": -torch.tensor(values)} if with_sum else {}))
        for id, value in zip(ids, values, strict=True):
            self.model[id] = ([value] * DIM, -value if with_sum else self.model[id][1], self.model[id][2])

    @rule(ids=BATCHES, step=st.integers(1, 2**60))
    def write_in_place(self, ids: list[int], step: int) -> None:
        rows = self.table.lookup(batch(ids))
        self.table.slot("step_filter")[rows] = step
        self.expect_present(ids)
        for id in ids:
            self.model[id] = (*self.model[id][:2], step)

    @rule(ids=BATCHES)
    def remove(self, ids: list[int]) -> None:
        self.both.remove(ids)

    @rule()
    def clear(self) -> None:
        self.both.clear()

    @invariant()
    def same_rows(self) -> None:
        ids, rows = self.table.ids(), self.table.used_rows()
        assert len(self.table) == len(self.model)
        assert rows.tolist() == sorted(set(rows.tolist()))
        assert torch.equal(self.table.lookup(ids, insert=False), rows)
        assert all(row < self.table.capacity for row in rows.tolist())
        columns = (self.table.embedding, self.table.slot("sum"), self.table.slot("step_filter"))
        values = zip(*(column[rows].tolist() for column in columns), strict=True)
        assert dict(zip(ids.tolist(), values, strict=True)) == self.model


TestDictModel = DictModel.TestCase
TestDictModel.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_is_a_table() -> None:
    table = new_table(shard=(1, 2))
    assert isinstance(table, Table)
    assert (table.name, table.shard, table.dim, table.dtype) == ("user", (1, 2), DIM, torch.float32)
    assert table.device == torch.device("cpu")
    assert repr(table) == "HashTable('user', dim=3, rows=0, shard=(1, 2))"


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0, 3)])
def test_lookup_keeps_the_shape(shape: tuple[int, ...]) -> None:
    ids = torch.arange(int(np.prod(shape))).reshape(shape)
    table = new_table()
    assert table.lookup(ids).shape == shape
    assert torch.equal(table.lookup(ids.numpy()), table.lookup(ids))


def test_lookup_takes_strided_and_read_only_ids() -> None:
    table = new_table()
    ids = torch.arange(20).reshape(4, 5)
    read_only = np.arange(20)[::2]
    read_only.flags.writeable = False
    assert torch.equal(table.lookup(ids.t()), table.lookup(ids).t())
    assert torch.equal(table.lookup(read_only), table.lookup(torch.arange(0, 20, 2)))


def test_growth_is_geometric_and_keeps_rows() -> None:
    table = new_table(capacity=4)
    table.lookup(torch.arange(4))
    table.embedding.fill_(9.0)
    rows, capacities = table.lookup(torch.arange(4)), set()
    for id in range(4, 2000):
        table.lookup(batch([id]))
        capacities.add(table.capacity)
    assert len(capacities) < 20
    assert torch.equal(table.lookup(torch.arange(4)), rows)
    assert torch.equal(table.embedding[rows], torch.full((4, DIM), 9.0))


def test_growth_in_inference_mode_leaves_columns_trainable() -> None:
    table = new_table(capacity=1)
    with torch.inference_mode():
        rows = table.lookup(torch.arange(50))
    table.embedding[rows.clone()] += 1.0
    assert not table.embedding.is_inference()


def test_reborn_row_starts_anew() -> None:
    table = new_table()
    row = table.lookup(batch([5]))
    table.embedding[row], table.slot("sum")[row], table.slot("step_filter")[row] = 1.0, 1.0, 1
    table.remove(batch([5]))
    assert torch.equal(table.lookup(batch([6])), row)
    assert table.embedding[row].tolist() == [first_row(6)]
    assert table.slot("sum")[row].tolist() == [SUM_FILL]
    assert table.slot("step_filter")[row].tolist() == [0]


def test_contains_takes_ints_and_scalars() -> None:
    table = new_table()
    table.lookup(batch([-1]))
    assert -1 in table
    assert np.int64(-1) in table
    assert torch.tensor(-1) in table
    assert 1 not in table


@pytest.mark.parametrize("id", ["1", 1.0, True, None, 2**63, -(2**63) - 1, torch.tensor([1, 2])])
def test_contains_refuses_what_is_no_id(id: object) -> None:
    with pytest.raises(UsageError, match="table 'user'"):
        id in new_table()  # noqa: B015


def test_insert_shapes_follow_ids() -> None:
    table = new_table()
    table.insert(torch.arange(4).reshape(2, 2), torch.ones(2, 2, DIM), step_filter=torch.full((2, 2), 3))
    assert table.slot("step_filter")[table.lookup(torch.arange(4))].tolist() == [3] * 4
    table.insert(batch([]), torch.ones(0, DIM))
    assert len(table) == 4


@pytest.mark.parametrize(
    ("rows", "slots", "message"),
    [
        (
            torch.ones(2, DIM + 1),
            {},
            r"'embedding' of table 'user' have the wrong shape, found \(2, 4\), expected \(2, 3\)",
        ),
        (torch.ones(3, DIM), {}, "wrong shape"),
        (torch.ones(2, DIM).double(), {}, r"wrong dtype, found torch.float64, .*values.to\(torch.float32\)"),
        ([[1.0] * DIM] * 2, {}, "'embedding' of table 'user' must be .*; got a list"),
        (torch.ones(2, DIM), {"sum": torch.ones(2, 1)}, "'sum' of table 'user' have the wrong shape"),
        (torch.ones(2, DIM), {"momentum": torch.ones(2)}, "no slot 'momentum', expected"),
        (torch.ones(2, DIM), {"embedding": torch.ones(2, DIM)}, "no slot 'embedding'"),
    ],
)
def test_insert_refuses_before_any_change(rows: Any, slots: dict[str, torch.Tensor], message: str) -> None:
    table = new_table()
    with pytest.raises(UsageError, match=message):
        table.insert(batch([1, 2]), rows, **slots)
    assert len(table) == 0


def test_slot_names_known_ones() -> None:
    with pytest.raises(UsageError, match=r"table 'user' has no slot 'id', expected \['sum', 'step_filter'\]"):
        new_table().slot("id")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "name of a table must be a non-empty str without '@'; got ''"),
        ({"name": "a@b"}, "name of a table must be .*; got 'a@b'"),
        ({"name": 3}, "name of a table must be"),
        ({"dim": 0}, "dim of a table must be .*; got 0"),
        ({"dim": 2.0}, "dim of a table must be"),
        ({"capacity": 0}, "capacity of table 'user' must be .*; got 0"),
        ({"capacity": True}, "capacity of table 'user' must be"),
        ({"shard": (1, 1)}, r"shard of table 'user' must be .*; got \(1, 1\)"),
        ({"shard": (-1, 2)}, "shard of table 'user' must be"),
        ({"shard": [0, 2]}, "shard of table 'user' must be"),
        ({"shard": (0, 0, 2)}, "shard of table 'user' must be"),
        ({"shard": (0.0, 1)}, "shard of table 'user' must be"),
        ({"device": "warehouse"}, "device of table 'user' must be .*; got 'warehouse'"),
        ({"device": "meta"}, "device of table 'user' must be .*; got 'meta'"),
        ({"initializer": "zeros"}, "initializer of table 'user' must be .*; got 'zeros'"),
        ({"initializer": True}, "initializer of table 'user' must be"),
    ],
)
def test_constructor_refuses(options: dict[str, Any], message: str) -> None:
    arguments = {"name": "user", "dim": DIM, **options}
    with pytest.raises(UsageError, match=message):
        HashTable(arguments.pop("name"), arguments.pop("dim"), **arguments)


def test_failed_growth_leaves_the_table_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    table = new_table(capacity=2)
    rows = table.lookup(batch([1, 2]))
    table.embedding[rows] = 5.0
    allocate, calls = RowDevice.new_column, []

    def allocate_twice(place: RowDevice, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
        calls.append(shape)
        if len(calls) > 2:
            raise MemoryError
        return allocate(place, shape, dtype=dtype)

    with monkeypatch.context() as patch:
        patch.setattr(RowDevice, "new_column", allocate_twice)
        with pytest.raises(MemoryError):
            table.lookup(batch([2, 3, 4]))
    assert table.ids().tolist() == [1, 2]
    assert table.embedding[rows].tolist() == [[5.0] * DIM] * 2
    new_rows = table.lookup(batch([3, 4]))
    assert table.embedding[new_rows].tolist() == [first_row(3), first_row(4)]


def test_ids_whose_lookup_is_interrupted_have_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the insert of the core, which knows them from then on, and before the table has room for them."""
    table = new_table()
    id_map = type(table._store._ids)
    insert = id_map.insert

    def insert_and_signal(self: Any, *arguments: Any) -> Any:
        found = insert(self, *arguments)
        signal.raise_signal(signal.SIGINT)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(id_map, "insert", insert_and_signal)
        with pytest.raises(KeyboardInterrupt):
            table.lookup(torch.arange(1000))
    rows = table.lookup(torch.arange(1000))
    assert table.embedding[rows].tolist() == [first_row(id) for id in range(1000)]
    assert len(table) == 1000


def test_threads_share_a_table() -> None:
    table = new_table()

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(20):
            ids = random.integers(-500, 500, size=200)
            rows = table.lookup(ids)
            assert torch.equal(table.lookup(ids, insert=False), rows)
            cut = table.begin_cut()
            assert cut.rows_count == int((cut.runs[:, 1] - cut.runs[:, 0]).sum())
            cut.fence()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    ids = table.ids()
    assert len(set(ids.tolist())) == len(table) == len(ids)
    assert torch.equal(table.lookup(ids, insert=False), table.used_rows())
    assert table.embedding[table.used_rows()].tolist() == [first_row(id) for id in ids.tolist()]
