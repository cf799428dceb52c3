"""`table.update(rows, function)` and `with table.rows(ids)`: what they read, write and refuse."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch

from asyncckpt.errors import UsageError
from asyncckpt.tables import HashTable, MultiLevelTable
from tests.unit.tables.simulated_rows import tables_on_a_device
from tests.unit.tables.test_touched_rows_by_use import NEW_TABLE, batch, touched, version_of

Table = HashTable | MultiLevelTable


@pytest.fixture(params=NEW_TABLE)
def table(request: pytest.FixtureRequest) -> Table:
    """Ids 0 to 3, each row ten times its id."""
    table = NEW_TABLE[request.param]()
    table.insert(torch.arange(4), 10.0 * torch.arange(4.0).unsqueeze(1).expand(4, 3))
    return table


def embeddings(table: Table, *ids: int) -> list[float]:
    rows = table.lookup(batch(*ids), insert=False)
    return table.embedding[rows, 0].tolist()


def slot_of(table: Table) -> str:
    return table.schema().columns[-1].name


def test_what_a_block_changes_is_written_when_it_ends(table: Table) -> None:
    version = version_of(table)
    with table.rows(batch(3, 1)) as rows:
        assert rows.embedding[:, 0].tolist() == [30.0, 10.0]
        rows.embedding += 1.0
        rows[slot_of(table)] = 7
        assert rows.found.tolist() == [True, True]
        seen = rows
    assert embeddings(table, 0, 1, 2, 3) == [0.0, 11.0, 20.0, 31.0]
    assert touched(table, version) == [1, 3]
    for use in (lambda: seen.embedding, lambda: seen.__setitem__("embedding", 1.0)):
        with pytest.raises(UsageError, match="was used after the `with table"):
            use()


def test_update_by_rows_of_a_lookup(table: Table) -> None:
    rows = table.lookup(batch(3, 1))
    version = version_of(table)

    def double(values: Any) -> None:
        values.embedding = 2 * values.embedding

    table.update(rows, double)
    table.update(rows[:1].numpy(), double)
    assert embeddings(table, 0, 1, 2, 3) == [0.0, 20.0, 20.0, 120.0]
    assert touched(table, version) == [1, 3]


def test_values_have_the_shape_of_the_ids(table: Table) -> None:
    with table.rows(torch.tensor([[3, 1], [0, 2]])) as rows:
        assert rows.embedding.shape == (2, 2, 3)
        assert rows[slot_of(table)].shape[:2] == rows.found.shape == (2, 2)
        rows.embedding += torch.tensor([[1.0, 2.0], [3.0, 4.0]]).unsqueeze(2)
    assert embeddings(table, 0, 1, 2, 3) == [3.0, 12.0, 24.0, 31.0]
    with table.rows(batch()) as rows:
        assert rows.embedding.shape == (0, 3)


def test_ids_that_are_absent_read_as_zeros_and_stay_absent(table: Table) -> None:
    kept = table.lookup(batch(0, 2, 3))
    table.remove(batch(2))
    count, version = len(table), version_of(table)
    with_missing = torch.cat([batch(-1), kept, batch(-1)])
    table.update(with_missing, lambda values: values.embedding.add_(5.0))
    with table.rows(batch(1, 99, 2)) as rows:
        assert rows.embedding[:, 0].tolist() == [10.0, 0.0, 0.0]
        assert rows.found.tolist() == [True, False, False]
        rows.embedding += 1.0
    assert embeddings(table, 0, 1, 3) == [5.0, 11.0, 35.0]
    assert (len(table), touched(table, version)) == (count, [0, 1, 3])


def test_after_an_error_nothing_is_written_and_the_table_is_free(table: Table) -> None:
    version = version_of(table)

    def fail(values: Any) -> None:
        values.embedding += 1.0
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        table.update(table.lookup(batch(1), insert=False), fail)
    with pytest.raises(ValueError, match="no"), table.rows(batch(1)) as rows:
        fail(rows)
    assert embeddings(table, 1) == [10.0]
    assert touched(table, version) == [1], "rows are marked before they are written"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows["nothing"], "table 'user' has no column"),
        (lambda rows: rows["id"], "table 'user' has no column"),
        (
            lambda rows: rows.__setitem__("embedding", torch.zeros(1, 3)),
            r"column 'embedding' of table 'user' must be",
        ),
        (lambda rows: rows.__setitem__("embedding", torch.zeros(2, 3).half()), "float16"),
        (lambda rows: rows.__setitem__("embedding", [1.0]), "list"),
    ],
)
def test_wrong_values_are_refused(table: Table, change: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        table.update(table.lookup(batch(0, 1)), change)
    assert embeddings(table, 0, 1) == [0.0, 10.0]


def test_ids_and_rows_are_distinct(table: Table) -> None:
    with (
        pytest.raises(UsageError, match="ids of table 'user' to update are not distinct, found 3"),
        table.rows(batch(3, 1, 3)),
    ):
        pass
    row = table.lookup(batch(3))
    with pytest.raises(UsageError, match="rows of table 'user' to update are not distinct"):
        table.update(torch.cat([row, row]), lambda values: None)
    table.update(torch.cat([batch(-1, -1), row]), lambda values: values.embedding.zero_())
    assert embeddings(table, 3) == [0.0]


def test_the_table_is_held_meanwhile(table: Table) -> None:
    """By other threads it is waited for; here that would be for ever."""
    looked_up = threading.Event()

    def look_up() -> None:
        table.lookup(batch(1))
        looked_up.set()

    thread = threading.Thread(target=look_up)
    with table.rows(batch(1)) as rows:
        thread.start()
        with pytest.raises(UsageError, match="lookup of table 'user' waits for update of it on the same thread"):
            table.lookup(batch(1))
        assert not looked_up.wait(0.05)
        rows.embedding += 1.0
    thread.join(60)
    assert looked_up.is_set()


def test_gradients_of_a_block_stay_in_it(table: Table) -> None:
    weight = torch.ones(3, requires_grad=True)
    with table.rows(batch(1)) as rows:
        rows.embedding = rows.embedding * weight
    table.update(table.lookup(batch(2)), lambda values: values.embedding.mul_(weight))
    assert not table.embedding.requires_grad
    assert embeddings(table, 1, 2) == [10.0, 20.0]


def test_rows_of_ids_outside_of_the_cache_come_into_it() -> None:
    table = NEW_TABLE["levels"](cache_rows=4)  # type: ignore[call-arg]
    for begin in range(0, 12, 4):
        table.lookup(torch.arange(begin, begin + 4))
    with table.rows(batch(0, 5, 11)) as rows:
        rows.embedding = torch.tensor([1.0, 2.0, 3.0]).unsqueeze(1).expand(3, 3)
    assert isinstance(table, MultiLevelTable)
    assert table.read(batch(0, 5, 11, 6))["embedding"][:, 0].tolist() == [1.0, 2.0, 3.0, 0.5]


@pytest.mark.parametrize("name", NEW_TABLE)
@pytest.mark.parametrize("seed", range(3))
def test_on_a_device(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with tables_on_a_device(monkeypatch, seed=seed) as place:
        table = NEW_TABLE[name]()
        table.lookup(batch(0, 1, 2))
        with table.rows(batch(2, 50, 0)) as rows:
            rows.embedding = 0 * rows.embedding + 4.0
        found = place.runtime.read(table.embedding)[table.lookup_rows(np.array([0, 2]), insert=False), 0]
        assert found.tolist() == [4.0, 4.0]


NUMBERS = [3, 3.0, np.int64(3), np.uint8(3), np.float16(3), np.float32(3), np.float64(3)]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: type(number).__name__)
def test_one_number_for_all_may_be_one_of_numpy(number: Any) -> None:
    table = HashTable("t", 2, metadata={"n": torch.int64, "x": torch.float64, "b": torch.bool})
    table.lookup(batch(1, 2))
    with table.rows(batch(2, 1)) as rows:
        rows.embedding = rows["n"] = rows["x"] = number
        rows["b"] = np.bool_(True)
    read = table.read(batch(1, 2))
    assert [read[name].tolist() for name in ("embedding", "n", "x", "b")] == [
        [[3.0] * 2] * 2,
        [3, 3],
        [3.0] * 2,
        [True] * 2,
    ]


@pytest.mark.parametrize(
    ("column", "number"),
    [("n", number) for number in (1.5, np.float32(0.5), 2**63, -(2**63) - 1, 10**400, math.nan, math.inf)]
    + [("embedding", number) for number in (1e39, np.float64(-1e39), 10**400)]
    + [("x", 10**400)]
    + [("b", 2), ("b", 0.5), ("u", -1), ("u", np.int64(256)), ("n", np.complex64(1)), ("n", np.str_("1"))],
    ids=lambda value: str(value)[:20],
)
def test_a_number_that_the_column_cannot_have_is_refused(column: str, number: Any) -> None:
    table = HashTable(
        "t", 2, metadata={"n": torch.int64, "u": torch.uint8, "b": torch.bool, "x": torch.float64}, initializer=1.0
    )
    table.lookup(batch(1))
    before = table.read(batch(1))
    with table.rows(batch(1)) as rows, pytest.raises(UsageError, match=f"values for column '{column}' of table 't'"):
        rows[column] = number
    assert all(torch.equal(values, before[name]) for name, values in table.read(batch(1)).items())


def test_large_numbers_of_floats(table: Table) -> None:
    with table.rows(batch(1, 2)) as rows:
        rows.embedding = 2**70
    assert embeddings(table, 1, 2) == [2.0**70] * 2
    with table.rows(batch(1, 2)) as rows:
        rows.embedding = math.inf
    assert embeddings(table, 1, 2) == [math.inf, math.inf]


def test_a_view_of_the_table_is_a_value_like_any_other(table: Table) -> None:
    ids = batch(3, 1)
    table.lookup(ids)
    with table.rows(ids) as rows:
        view = table.embedding[:2]
        as_it_was = view.clone()
        rows.embedding = view
        rows.embedding += 1.0
        assert torch.equal(view, as_it_was), "the block has changed the table itself"
    assert torch.equal(table.read(ids)["embedding"], as_it_was + 1.0)
    for write in (
        lambda view: table.insert(ids, view),
        lambda view: table.update(table.lookup(ids), lambda rows: rows.__setitem__("embedding", view.detach())),
        lambda view: table.update(table.lookup(ids), lambda rows: rows.__setitem__("embedding", view.flip(0).flip(0))),
    ):
        view = table.embedding[:2]
        as_it_was = view.clone()
        write(view)
        assert torch.equal(table.read(ids)["embedding"], as_it_was)
