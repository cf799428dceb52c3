"""An id gets a row at its n-th lookup; until then it counts in the table of candidates."""

from __future__ import annotations

import threading
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.errors import UsageError
from asyncckpt.model.table import Role, Table
from asyncckpt.tables import HashEmbedding, HashEmbeddingBag, MultiLevelTable, SparseSGD
from asyncckpt.tables.candidates import CandidateTable
from tests.unit.tables.multi_level_world import BATCHES, DIM, new_hash_table, new_table
from tests.worlds.rows import batch

pytestmark = pytest.mark.filterwarnings("ignore:cache of table:RuntimeWarning")


KINDS: dict[str, Any] = {"hash": new_hash_table, "levels": new_table}
of_both_kinds = pytest.mark.parametrize("new_table", KINDS.values(), ids=KINDS)


def counts_of(table: Any) -> dict[int, int]:
    candidates = table.companions()["candidates"]
    assert isinstance(candidates, CandidateTable)
    ids, counts = candidates.counts()
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


@of_both_kinds
def test_an_id_gets_its_row_at_its_nth_lookup(new_table: Any) -> None:
    table = new_table(admit_after=3)
    assert table.lookup(batch([1, 1, 2])).tolist() == [-1, -1, -1]
    assert table.lookup(batch([1])).tolist() == [-1]
    assert counts_of(table) == {1: 2, 2: 1}
    assert len(table) == 0
    rows = table.lookup(batch([1, 2, 1]))
    assert (rows >= 0).tolist() == [True, False, True]
    assert counts_of(table) == {2: 2}
    assert table.ids().tolist() == [1]


@of_both_kinds
@settings(max_examples=60, deadline=None)
@given(
    admit_after=st.integers(1, 4),
    candidates_max=st.sampled_from([1, 2, 5, 8, 1 << 22]),
    batches=st.lists(BATCHES, max_size=20),
)
def test_admission_equals_a_dict(
    new_table: Any, admit_after: int, candidates_max: int, batches: list[list[int]]
) -> None:
    table = new_table(admit_after=admit_after, candidates_max=candidates_max)
    admitted, waiting = set[int](), dict[int, int]()
    for ids in batches:
        for id in set(ids) - admitted:
            waiting[id] = waiting.get(id, 0) + 1
        admitted |= {id for id, count in waiting.items() if count >= admit_after}
        if len(waiting) > candidates_max and admit_after > 1:
            while len(waiting) > candidates_max // 2:
                waiting = {id: count // 2 for id, count in waiting.items() if count > 1}
        waiting = {id: count for id, count in waiting.items() if id not in admitted}
        rows = table.lookup(batch(ids))
        assert [row >= 0 for row in rows.tolist()] == [id in admitted for id in ids]
        if admit_after > 1:
            assert counts_of(table) == waiting
            assert len(waiting) <= candidates_max
    assert set(table.ids().tolist()) == admitted


@of_both_kinds
def test_candidates_beyond_their_bound_are_forgotten_the_rare_ones_first(new_table: Any) -> None:
    table = new_table(admit_after=9, candidates_max=4)
    for ids in ([1], [1, 2], [1, 2], [1, 2, 3]):
        table.lookup(batch(ids))
    assert counts_of(table) == {1: 4, 2: 3, 3: 1}
    table.lookup(batch([4, 5]))
    assert counts_of(table) == {1: 2, 2: 1}


@of_both_kinds
def test_neither_eval_nor_prefetch_counts(new_table: Any) -> None:
    table = new_table(admit_after=2)
    table.lookup(batch([1]), insert=False)
    table.read(batch([1]), absent_as_zeros=True)
    if isinstance(table, MultiLevelTable):
        table.prefetch(batch([1]))
    assert counts_of(table) == {}


@of_both_kinds
def test_insert_admits_and_removal_begins_anew(new_table: Any) -> None:
    table = new_table(admit_after=2)
    table.lookup(batch([1, 2]))
    table.insert(batch([1]), torch.ones(1, DIM))
    assert counts_of(table) == {2: 1}
    assert 1 in table
    table.remove(batch([1]))
    assert table.lookup(batch([1])).tolist() == [-1]
    table.clear()
    assert counts_of(table) == {}


@of_both_kinds
def test_candidates_are_a_table_of_the_same_shard(new_table: Any) -> None:
    table = new_table(admit_after=2, shard=(1, 2))
    candidates = table.companions()["candidates"]
    assert isinstance(candidates, Table)
    assert (candidates.name, candidates.shard) == ("user.candidates", (1, 2))
    assert [(column.name, column.role) for column in candidates.schema().columns] == [
        ("id", Role.ID),
        ("count", Role.METADATA),
    ]
    assert repr(candidates) == "CandidateTable('user.candidates', rows=0, shard=(1, 2))"
    with pytest.raises(UsageError, match=r"id 2 belongs to shard 0 of 2, and .* holds shard 1 of 2"):
        table.lookup(batch([2]))
    assert len(candidates) == 0  # type: ignore[arg-type]


@of_both_kinds
def test_candidates_are_cut_and_loaded(new_table: Any) -> None:
    table, fresh = new_table(admit_after=3), new_table(admit_after=3)
    table.lookup(batch([5, 6]))
    table.lookup(batch([6]))
    cut = table.companions()["candidates"].begin_cut()
    ids, counts = (
        torch.cat([cut.column(name)[begin:end] for begin, end in cut.runs]).clone() for name in ("id", "count")
    )
    cut.end(True)
    load = fresh.companions()["candidates"].begin_load(clear=True, rows_count=2, filled=["count"])
    rows = load.insert(ids)
    load.column("count")[rows] = counts
    load.end(True)
    assert counts_of(fresh) == {5: 1, 6: 2}
    assert (fresh.lookup(batch([5, 6])) >= 0).tolist() == [False, True]


@of_both_kinds
def test_rare_candidates_can_be_forgotten(new_table: Any) -> None:
    table = new_table(admit_after=5)
    for ids in ([1, 2], [1], [1, 3]):
        table.lookup(batch(ids))
    candidates = table.companions()["candidates"]
    assert isinstance(candidates, CandidateTable)
    assert candidates.evict("count", below=2) == 2
    assert counts_of(table) == {1: 3}
    with pytest.raises(UsageError, match=r"column for an eviction from table 'user\.candidates' must be"):
        candidates.evict("age", below=2)


@of_both_kinds
def test_lookups_and_cuts_of_both_tables_in_any_order_do_not_lock_each_other_out(new_table: Any) -> None:
    table = new_table(admit_after=2)
    both: list[Any] = [table, table.companions()["candidates"]]

    def look_up() -> None:
        random = np.random.default_rng(0)
        for _ in range(100):
            table.lookup(random.integers(0, 500, size=20))

    thread = threading.Thread(target=look_up)
    thread.start()
    for number in range(100):
        cuts = [part.begin_cut() for part in (both if number % 2 else both[::-1])]
        for cut in cuts:
            cut.end(True)
    thread.join()


@of_both_kinds
@pytest.mark.parametrize("kind", [HashEmbedding, HashEmbeddingBag])
def test_ids_that_are_not_admitted_train_as_zeros_without_gradient(new_table: Any, kind: Any) -> None:
    table = new_table(admit_after=2, initializer=1.0)
    table.lookup(batch([1]))
    # What a free row holds must not show.
    table.embedding.fill_(float("nan"))
    module = kind(table) if kind is HashEmbedding else kind(table, mode="sum")
    optimizer = SparseSGD(module, lr=0.5)
    module.step = 4
    out = module(batch([[1], [7], [1]]))
    assert out.reshape(3, DIM).tolist() == [[1.0] * DIM, [0.0] * DIM, [1.0] * DIM]
    out.sum().backward()
    # The second forward admits 7; the gradient of the first must not reach it.
    module(batch([[7]]))
    optimizer.step()
    values = table.read(batch([1, 7]))
    assert values["embedding"].tolist() == [[0.0] * DIM, [1.0] * DIM]
    assert values["last_seen"].tolist() == [4, 4]


@of_both_kinds
def test_shrinking_gives_the_memory_of_candidates_back_too(new_table: Any) -> None:
    table = new_table(admit_after=2)
    candidates = table.companions()["candidates"]
    for _ in range(2):
        table.lookup(torch.arange(5000))
    table.remove(torch.arange(4990))
    bytes_before = candidates.statistics().bytes + table.statistics().bytes
    freed_bytes = table.shrink()
    assert candidates.statistics().bytes + table.statistics().bytes == bytes_before - freed_bytes
    assert candidates.capacity < 5000
    assert table.lookup(batch([1, 4999])).tolist()[0] == -1
    assert counts_of(table) == {1: 1}


@of_both_kinds
def test_an_id_that_is_admitted_while_the_table_is_copied_is_in_the_copy(
    new_table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = new_table(admit_after=2)
    table.lookup(batch([1, 2]))
    read_all, get_state = type(table)._read_all, CandidateTable.__getstate__

    def admit(*_: Any) -> None:
        if table._lock._thread is None:
            table.lookup(batch([2]))

    for kind, name, function in ((type(table), "_read_all", read_all), (CandidateTable, "__getstate__", get_state)):
        monkeypatch.setattr(kind, name, lambda *args, _own=function, **kw: (admit(), _own(*args, **kw))[1])
    copied = deepcopy(table)
    assert 2 in table
    assert {1, 2} <= set(copied.ids().tolist()) | set(counts_of(copied))


@of_both_kinds
def test_admitted_ids_alone_are_counted(new_table: Any) -> None:
    table = new_table(metadata={"count": torch.int64}, admit_after=2)
    module = HashEmbedding(table)
    module(batch([7, 9, 9]))
    # 9 is admitted now; 5 and 8, before and after it in the order of ids, are not.
    module(batch([5, 9, 9, 9, 8, 10, 10]))
    assert table.ids().tolist() == [9]
    assert table.read(batch([9]))["count"].tolist() == [3]


@of_both_kinds
def test_a_batch_of_candidates_alone_trains(new_table: Any) -> None:
    table = new_table(admit_after=2)
    module = HashEmbedding(table)
    out = module(batch([1, 2]))
    assert out.tolist() == [[0.0] * DIM] * 2
    out.sum().backward()
    SparseSGD(module, lr=1.0).step()
    assert counts_of(table) == {1: 1, 2: 1}
