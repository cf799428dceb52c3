"""audit=True finds rows that were changed without a mark, whatever kind of save there is, or refuses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import DebugOptions, DeltaPolicy, DeviceOptions, HashTable, Loader, MultiLevelTable, Saver, UsageError
from tests.deltas.test_kinds import filled_table, loaded
from tests.worlds.rows import rows_of

AUDIT = DebugOptions(audit=True)


def new_levels() -> MultiLevelTable:
    table = MultiLevelTable("user", 4, cache_rows=100, optimizer_slots={"sum": torch.float32})
    table.lookup(torch.arange(60))
    return table


TABLES: dict[str, Callable[[], Any]] = {"hash": filled_table, "levels": new_levels}
OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {},
    "first touch": {"device": DeviceOptions(host_level="first_touch")},
    "row filters": {"filters": [asyncckpt.filters.skip_zero_rows("user@sum")]},
    "deltas": {"deltas": DeltaPolicy()},
}


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("new_table", TABLES.values(), ids=list(TABLES))
def test_every_kind_of_save_is_audited(new_table: Any, options: Any, blocking: bool, tmp_path: Path) -> None:
    table = new_table()
    with Saver(path=tmp_path, hashtables={"user": table}, debug=AUDIT, **options) as saver:
        for step in range(1, 6):
            missed = (saver.save(step) if blocking else saver.save_async(step).result(60)).missed_ids
            # Nothing was written before the third save without a mark, and something else before each later one.
            assert {name: sorted(ids) for name, ids in missed.items()} == ({"user": [step]} if step > 2 else {})
            table.update(table.lookup(torch.tensor([50])), lambda rows: rows.embedding.add_(1.0))
            if step > 1:
                row = table.lookup(torch.tensor([step + 1]), insert=False)
                table.embedding.numpy()[row] = float(step)


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"host_memory_limit": 0}, "a snapshot of .* does not fit"),
        ({"filter_func": lambda blocks: blocks}, "filter_func"),
    ],
)
def test_what_cannot_be_audited_is_refused(options: Any, reason: str, blocking: bool, tmp_path: Path) -> None:
    table = filled_table()
    with Saver(path=tmp_path, hashtables={"user": table}, debug=AUDIT, **options) as saver:
        with pytest.raises(UsageError, match=rf"audit=True cannot compare .* tables: .*{reason}.* \['user'\]"):
            saver.save(1) if blocking else saver.save_async(1)
        table.lookup(torch.tensor([5000]))  # It is free again.
    with Saver(path=tmp_path, hashtables={"user": table}) as saver:
        assert saver.save(1).missed_ids == {}
    assert loaded(tmp_path, 1) == rows_of(table)


WRITES: dict[str, Callable[[HashTable, torch.Tensor], Any]] = {
    "data": lambda table, rows: table.embedding.data.index_fill_(0, rows, 7.0),
    "numpy": lambda table, rows: table.embedding.numpy().__setitem__(rows.numpy(), 7.0),
    "dlpack": lambda table, rows: torch.from_dlpack(table.embedding).index_fill_(0, rows, 7.0),
    "fused optimizer": lambda table, rows: _fused_step(table, rows),
}


def _fused_step(table: HashTable, rows: torch.Tensor) -> None:
    weight = torch.nn.Parameter(table.embedding)
    weight.grad = torch.zeros_like(weight).index_fill_(0, rows, 1.0)
    torch.optim.SGD([weight], lr=1.0, fused=True).step()


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
@pytest.mark.parametrize("is_marked", [False, True])
def test_writes_that_torch_does_not_count_need_a_mark(write: Any, is_marked: bool, tmp_path: Path) -> None:
    """Or an audit. Fails when a torch counts one of them: the pages on tables name them."""
    results = {}
    for is_audited in (False, True):
        table, path = filled_table(), tmp_path / str(is_audited)
        with Saver(path=path, hashtables={"user": table}, debug=DebugOptions(audit=is_audited)) as saver:
            for step in (1, 2):
                saver.save_async(step).result(60)
            rows = table.lookup(torch.tensor([8, 9]), insert=False)
            write(table, rows)
            if is_marked:
                table.touch(rows)
            results[is_audited] = saver.save_async(3).result(60).missed_ids
        is_held = loaded(path, 3) == rows_of(table)
        assert is_held == (is_marked or is_audited)
    assert results[False] == {}
    assert {name: sorted(ids) for name, ids in results[True].items()} == ({} if is_marked else {"user": [8, 9]})


def test_what_versions_show_is_not_missed(tmp_path: Path) -> None:
    """No mark was needed: all rows were compared."""
    table = filled_table()
    with Saver(path=tmp_path, hashtables={"user": table}, deltas=DeltaPolicy(), debug=AUDIT) as saver:
        saver.save(1)
        table.embedding[table.lookup(torch.tensor([8]), insert=False)] = 7.0
        result = saver.save(2)
        assert (result.kind, result.rows_count, result.missed_ids) == ("delta", 1, {})
    target = HashTable("user", 4, optimizer_slots={"sum": torch.float32})
    Loader(tmp_path, {"user": target}).load()
    assert rows_of(target) == rows_of(table)
