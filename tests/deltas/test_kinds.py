"""Which kind of checkpoint a save makes, what a delta holds, and what it builds upon."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import DeltaPolicy, HashTable, Loader, Saver, SaveResult, UsageError, inspection
from tests.worlds.directories import document_of
from tests.worlds.gates import Gate, unchanged
from tests.worlds.rows import rows_of

ALWAYS = DeltaPolicy(deltas_max=1000, bytes_share_max=1000.0)
ROWS = 300


def new_table(name: str = "user", dim: int = 4) -> HashTable:
    return HashTable(name, dim, optimizer_slots={"sum": torch.float32})


def write(table: HashTable, ids: torch.Tensor, value: float) -> None:
    def write_rows(rows: Any) -> None:
        rows.embedding, rows["sum"] = torch.full_like(rows.embedding, value), -value

    table.update(table.lookup(ids), write_rows)


def filled_table(name: str = "user") -> HashTable:
    table = new_table(name)
    write(table, torch.arange(ROWS), 1.0)
    return table


def loaded(path: Path, step: int) -> dict[int, tuple[Any, ...]]:
    table = new_table()
    Loader(path, {"user": table}, step=step).load()
    return rows_of(table)


def save(saver: Saver, step: int, **options: Any) -> SaveResult:
    return saver.save_async(step, **options).result(60)


@pytest.mark.parametrize("kind", ["full", "auto"])
def test_without_a_policy_saves_are_full(tmp_path: Path, kind: Any) -> None:
    table = filled_table()
    with Saver(path=tmp_path, hashtables={"user": table}) as saver:
        assert [save(saver, step, kind=kind).kind for step in (1, 2, 3)] == ["full"] * 3


def test_a_delta_needs_something_to_build_upon(tmp_path: Path) -> None:
    table = filled_table()
    with Saver(path=tmp_path, hashtables={"user": table}) as saver:
        with pytest.raises(UsageError, match="needs a base"):
            saver.save_async(1, kind="delta")
        save(saver, 1)
        assert save(saver, 2, kind="delta").kind == "delta"
    with Saver(path=tmp_path, hashtables={"user": table}) as saver, pytest.raises(UsageError, match="needs a base"):
        saver.save_async(3, kind="delta")


def test_a_wrong_kind_is_named(tmp_path: Path) -> None:
    with Saver(path=tmp_path) as saver, pytest.raises(UsageError, match="kind must be"):
        saver.save_async(1, kind="incremental")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [{"deltas_max": 0}, {"deltas_max": True}, {"bytes_share_max": 0}, {"bytes_share_max": "1"}, {"seconds_max": -1}],
)
def test_a_wrong_policy_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        DeltaPolicy(**wrong)


def test_a_full_one_after_so_many_deltas(tmp_path: Path) -> None:
    table = filled_table()
    policy = DeltaPolicy(deltas_max=2, bytes_share_max=1000.0)
    with Saver(path=tmp_path, hashtables={"user": table}, deltas=policy) as saver:
        kinds = [save(saver, step).kind for step in range(7)]
        assert saver.statistics().deltas_count == 4
    assert kinds == ["full", "delta", "delta", "full", "delta", "delta", "full"]


def six_kinds(path: Path, table: HashTable, policy: DeltaPolicy, between: Callable[[], object]) -> list[str]:
    kinds = []
    with Saver(path=path, hashtables={"user": table}, deltas=policy) as saver:
        for step in range(6):
            kinds.append(save(saver, step).kind)
            between()
    return kinds


def test_a_full_one_when_deltas_grow_too_large(tmp_path: Path) -> None:
    table = HashTable("user", 256)
    table.lookup(torch.arange(ROWS))
    policy = DeltaPolicy(deltas_max=1000, bytes_share_max=0.5)
    # A fifth of the rows, so two deltas fit.
    kinds = six_kinds(tmp_path, table, policy, lambda: table.lookup(torch.arange(60)))
    assert kinds == ["full", "delta", "delta", "full", "delta", "delta"]


def test_a_full_one_when_the_last_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("asyncckpt.engine.features.deltas.time.monotonic", lambda: now[0])
    monkeypatch.setattr("asyncckpt.engine.save.run_save.time.monotonic", lambda: now[0])
    policy = DeltaPolicy(deltas_max=1000, bytes_share_max=1000.0, seconds_max=60.0)
    kinds = six_kinds(tmp_path, filled_table(), policy, lambda: now.__setitem__(0, now[0] + 25.0))
    assert kinds == ["full", "delta", "delta", "full", "delta", "delta"]


@pytest.mark.parametrize("blocking", [False, True])
def test_a_delta_holds_what_was_written_since(tmp_path: Path, blocking: bool) -> None:
    table = filled_table()
    w = torch.zeros(3)
    with Saver(path=tmp_path, hashtables={"user": table}, tensors={"w": w}, deltas=ALWAYS) as saver:

        def one(step: int) -> SaveResult:
            return saver.save(step) if blocking else save(saver, step)

        one(1)
        write(table, torch.tensor([5, 7, 1000]), 2.0)
        table.remove(torch.tensor([9, 7, 10]))
        write(table, torch.tensor([10]), 3.0)  # Gone and back.
        w += 1
        result = one(2)
        expected = rows_of(table)
    assert (result.kind, result.rows_count) == ("delta", 3)
    info = document_of(tmp_path, 2)
    assert [parent["step"] for parent in info["parents"]] == [1]
    assert info["tables"] == [{"name": "user", "rows": 3, "shard": [0, 1], "whole": False, "removed": 3}]
    assert loaded(tmp_path, 2) == expected
    target = torch.zeros(3)
    Loader(tmp_path, tensors={"w": target}, step=2).load()
    assert target.tolist() == [1.0] * 3


def test_rows_written_during_a_save_are_in_the_next_delta(tmp_path: Path) -> None:
    table = filled_table()
    with Saver(path=tmp_path, hashtables={"user": table}, deltas=ALWAYS) as saver:
        rows = table.lookup(torch.tensor([3, 4]))
        future = saver.save_async(1)
        before = rows_of(table)
        table.update(rows, lambda values: values.embedding.fill_(9.0))  # Held across the cut.
        future.result(60)
        assert save(saver, 2).rows_count == 2
        assert loaded(tmp_path, 1) == before
        assert loaded(tmp_path, 2) == rows_of(table)


def test_a_queued_delta_builds_upon_what_is_committed(tmp_path: Path) -> None:
    table = filled_table()
    gate, images = Gate(), {}
    with Saver(path=tmp_path, hashtables={"user": table}, filter_func=gate, deltas=ALWAYS, keep=1) as saver:
        gate.open()
        save(saver, 1)
        gate.shut()
        futures = []
        for step in (2, 3):
            write(table, torch.tensor([step]), float(step))
            images[step] = rows_of(table)
            futures.append(saver.save_async(step, on_busy="queue", kind="full" if step == 2 else "delta"))
        gate.open()
        kinds = [future.result(60).kind for future in futures]
    assert kinds == ["full", "delta"]
    # Step 1 was not needed by the full step 2, but by the delta that was queued behind it.
    assert [parent["step"] for parent in document_of(tmp_path, 3)["parents"]] == [1]
    assert asyncckpt.list_steps(tmp_path) == [1, 3]
    assert loaded(tmp_path, 3) == images[3]


def test_a_cleared_table_is_whole(tmp_path: Path) -> None:
    table = filled_table()
    with Saver(path=tmp_path, hashtables={"user": table}, deltas=ALWAYS) as saver:
        save(saver, 1)
        table.clear()
        write(table, torch.tensor([5]), 5.0)
        assert save(saver, 2).kind == "delta"
    assert "whole" not in document_of(tmp_path, 2)["tables"][0]
    assert loaded(tmp_path, 2) == rows_of(table)


def test_a_loaded_table_is_whole(tmp_path: Path) -> None:
    table = filled_table()
    with Saver(path=tmp_path, hashtables={"user": table}, deltas=ALWAYS) as saver:
        save(saver, 1)
        write(table, torch.tensor([5]), 5.0)
        save(saver, 2)
        Loader(tmp_path, {"user": table}, step=1).load()
        save(saver, 3)
        assert loaded(tmp_path, 3) == loaded(tmp_path, 1) == rows_of(table)


def test_a_user_filter_sees_all_rows_and_the_delta_holds_some(tmp_path: Path) -> None:
    seen = []

    def doubled(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
        seen.append({block.tensor_name(): block.shape for block in blocks})
        return [b.replace(data=b.data * 2) if b.column == "embedding" else b for b in blocks]

    table = filled_table()
    with Saver(path=tmp_path, hashtables={"user": table}, filter_func=doubled, deltas=ALWAYS) as saver:
        save(saver, 1)
        write(table, torch.tensor([5, 6]), 2.0)
        table.remove(torch.tensor([7]))
        result = save(saver, 2)
    assert (result.kind, result.rows_count) == ("delta", 2)
    assert seen[1]["user@embedding"] == (ROWS - 1, 4)
    found = loaded(tmp_path, 2)
    assert found[5] == (4.0,) * 4 + (-2.0,) * 4
    assert found[8] == (2.0,) * 4 + (-1.0,) * 4
    assert 7 not in found


def test_a_user_filter_that_renames_makes_tables_whole(tmp_path: Path) -> None:
    def renamed(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
        return [block.replace(name=f"other@{block.column}") for block in blocks]

    table = filled_table()
    with Saver(path=tmp_path, hashtables={"user": table}, filter_func=renamed, deltas=ALWAYS) as saver:
        save(saver, 1)
        table.remove(torch.tensor([7]))
        assert save(saver, 2).kind == "delta"
    target = new_table("other")
    Loader(tmp_path, {"other": target}, step=2).load()
    assert rows_of(target) == rows_of(table)


def _renamed(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
    return [b.replace(name=f"other@{b.column}") if b.table == "user" else b for b in blocks]


def _swapped(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
    names = {"user": "item", "item": "user"}
    return [block.replace(name=f"{names[str(block.table)]}@{block.column}") for block in blocks]


def _shortened(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
    return [block for block in blocks if block.column != "sum"]


def _rounded(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
    return [b.replace(data=b.data.double()) if b.column == "embedding" else b for b in blocks]


def _of_other_ids(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
    return [b.replace(data=b.data + 1) if b.column == "id" else b for b in blocks]


FILTERS = [unchanged, _renamed, _swapped, _shortened, _rounded, _of_other_ids]


@pytest.mark.parametrize("second", FILTERS)
@pytest.mark.parametrize("first", FILTERS)
def test_rows_are_laid_only_over_those_that_a_user_filter_has_left_alike(
    tmp_path: Path, first: Any, second: Any
) -> None:
    """What it writes otherwise than the save before, or with other ids, is written whole."""
    now, tables = [first], {"user": filled_table(), "item": filled_table("item")}
    with (
        Saver(path=tmp_path / "deltas", hashtables=tables, filter_func=lambda b: now[0](b), deltas=ALWAYS) as saver,
        Saver(path=tmp_path / "full", hashtables=tables, filter_func=lambda b: now[0](b)) as full,
    ):
        save(saver, 1)
        for value, table in enumerate(tables.values(), 2):
            write(table, torch.tensor([5, ROWS + 5]), float(value))
            table.remove(torch.tensor([7]))
        now[0] = second
        assert save(saver, 2).kind == "delta"
        save(full, 2)
    assert inspection.compare(tmp_path / "deltas", 2, 2, other_path=tmp_path / "full").is_same


def test_saver_compacts_beside_training(tmp_path: Path) -> None:
    table = filled_table()
    with Saver(path=tmp_path, hashtables={"user": table}, deltas=ALWAYS, keep=2) as saver:
        for step in range(1, 5):
            write(table, torch.tensor([step]), float(step))
            save(saver, step)
        saver.wait_idle(60)  # Also for retention.
        assert asyncckpt.list_steps(tmp_path) == [1, 2, 3, 4]
        assert not saver.compact(3).result(60).skipped
        assert saver.compact(1).result(60).skipped
        write(table, torch.tensor([50]), 5.0)
        save(saver, 5)  # Its chain ends at step 3 now, so the older ones go.
        saver.wait_idle(60)
        assert asyncckpt.list_steps(tmp_path) == [3, 4, 5]
        with pytest.raises(asyncckpt.NotFoundError):
            saver.compact(77).result(60)
        with pytest.raises(UsageError, match="step must be"):
            saver.compact(-1)
    assert loaded(tmp_path, 5) == rows_of(table)


def test_a_predicate_that_writes_to_its_rows_changes_nothing(tmp_path: Path) -> None:
    """Neither this checkpoint nor a later one, which takes unwritten rows from the arena."""

    def scribble(columns: Any) -> torch.Tensor:
        columns["embedding"].fill_(-9.0)
        columns["sum"].numpy()[:] = -9.0
        return columns["id"] >= 0

    table = filled_table()
    rules = [asyncckpt.filters.keep_rows("user", scribble)]
    with Saver(path=tmp_path, hashtables={"user": table}, filters=rules) as saver:
        for step in (1, 2):
            write(table, torch.tensor([step]), float(step))
            assert save(saver, step).rows_copied == (ROWS if step == 1 else 1)
            assert loaded(tmp_path, step) == rows_of(table)


def test_a_fence_that_raises_keeps_no_arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = filled_table()
    with Saver(path=tmp_path, hashtables={"user": table}, on_busy=asyncckpt.BusyPolicy("raise", deadline=5.0)) as saver:
        save(saver, 1)
        with monkeypatch.context() as broken:
            from asyncckpt.tables.table_lock import HashTableCut

            plain = HashTableCut.fence

            def fence(self: HashTableCut) -> None:
                plain(self)
                raise RuntimeError("no fence")

            broken.setattr(HashTableCut, "fence", fence)
            for step in (2, 3, 4):  # More than there are arenas.
                with pytest.raises(RuntimeError, match="no fence"):
                    saver.save_async(step)
        assert save(saver, 5).kind == "full"
    assert loaded(tmp_path, 5) == rows_of(table)


def test_a_step_below_the_newest_one_cannot_be_a_delta(tmp_path: Path) -> None:
    """After a job was rolled back: readers want the steps of a chain to descend."""
    table = filled_table()
    with Saver(path=tmp_path, hashtables={"user": table}, deltas=ALWAYS) as saver:
        saver.save(10)
        with pytest.raises(UsageError, match="step 5 is not above step 10"):
            saver.save_async(5, kind="delta")
        assert saver.save(5).kind == "full"
        assert saver.save(6).kind == "delta"
    assert asyncckpt.verify(tmp_path, 6).steps == (6, 5)


@pytest.mark.parametrize("policy", [None, ALWAYS], ids=["no policy", "policy"])
@pytest.mark.parametrize("how", ["staged", "blocking", "too large for an arena", "filtered"])
def test_a_delta_holds_just_the_rows_that_were_written_however_it_is_made(
    tmp_path: Path, how: str, policy: DeltaPolicy | None
) -> None:
    table, options = filled_table(), dict[str, Any]()
    if how == "too large for an arena":
        options["host_memory_limit"] = 1
    if how == "filtered":
        options["filter_func"] = lambda blocks: blocks
    with Saver(path=tmp_path, hashtables={"user": table}, deltas=policy, **options) as saver:
        saver.save(1)
        write(table, torch.arange(5, 12), 2.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # It says why it blocks.
            made = saver.save(2, kind="delta") if how == "blocking" else save(saver, 2, kind="delta")
    assert (made.kind, made.rows_count) == ("delta", 7)
    assert loaded(tmp_path, 2) == rows_of(table)
