"""Tables without marks: deltas hold the rows whose print has changed; and audits find rows whose mark is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt import DeltaPolicy, HashTable, Loader, Saver
from asyncckpt.adapters import tables_of
from asyncckpt.model.table import Table
from tests.deltas.test_kinds import filled_table, loaded, save, write
from tests.worlds.directories import document_of
from tests.worlds.rows import rows_of

ALWAYS = DeltaPolicy(deltas_max=1000, bytes_share_max=1000.0)


class WithoutMarks:
    """A hash table whose cuts do not say what was written."""

    def __init__(self, table: HashTable) -> None:
        self.inner = table
        self.name, self.shard = table.name, table.shard
        self.schema, self.begin_load = table.schema, table.begin_load

    def begin_cut(self) -> asyncckpt.table.TableCut:
        cut = self.inner.begin_cut()

        class Plain:
            rows_count, runs, column, fence, end = cut.rows_count, cut.runs, cut.column, cut.fence, cut.end

        return Plain()


def test_embedding_module_writes_the_rows_that_changed(tmp_path: Path) -> None:
    module = torch.nn.Embedding(500, 6)
    with Saver(path=tmp_path, hashtables=module, deltas=ALWAYS) as saver:
        save(saver, 1)
        with torch.no_grad():
            module.weight[[3, 400]] += 1
        result = save(saver, 2)
        assert (result.kind, result.rows_count) == ("delta", 2)
        assert save(saver, 3).rows_count == 0
        with torch.no_grad():
            module.weight[7] = 0
        assert save(saver, 4).rows_count == 1
    target = torch.nn.Embedding(500, 6)
    Loader(tmp_path, target, step=4).load()
    assert torch.equal(target.weight, module.weight)
    assert [name for name in tables_of(target)] == [t["name"] for t in document_of(tmp_path, 4)["tables"]]


def test_ids_that_come_and_go_are_found(tmp_path: Path) -> None:
    inner = filled_table()
    table: Table = WithoutMarks(inner)
    with Saver(path=tmp_path, hashtables={"user": table}, deltas=ALWAYS) as saver:
        save(saver, 1)
        write(inner, torch.tensor([5, 1000]), 2.0)
        inner.remove(torch.tensor([9, 10]))
        write(inner, torch.tensor([1001]), 3.0)  # Into a row that was freed.
        result = save(saver, 2)
        assert (result.kind, result.rows_count) == ("delta", 3)
        assert document_of(tmp_path, 2)["tables"][0]["removed"] == 2
        assert loaded(tmp_path, 2) == rows_of(inner)


def test_a_failed_save_leaves_the_prints_of_the_last_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = filled_table()
    with Saver(path=tmp_path, hashtables={"user": WithoutMarks(inner)}, deltas=ALWAYS) as saver:
        save(saver, 1)
        write(inner, torch.tensor([5]), 2.0)
        with monkeypatch.context() as broken:
            broken.setattr("asyncckpt.commit.transaction.Transaction.commit", None)
            assert saver.save_async(2).exception(60) is not None
        write(inner, torch.tensor([6]), 2.0)
        assert save(saver, 3).rows_count == 2
        assert loaded(tmp_path, 3) == rows_of(inner)


def test_a_blocking_delta_holds_them_whole(tmp_path: Path) -> None:
    inner = filled_table()
    with Saver(path=tmp_path, hashtables={"user": WithoutMarks(inner)}, deltas=ALWAYS) as saver:
        saver.save(1)
        write(inner, torch.tensor([5]), 2.0)
        result = saver.save(2)
        assert (result.kind, result.rows_count) == ("delta", len(inner))
        save(saver, 3)  # There are no prints to compare with yet.
        write(inner, torch.tensor([6]), 2.0)
        assert save(saver, 4).rows_count == 1
    assert loaded(tmp_path, 4) == rows_of(inner)


@pytest.mark.parametrize("kind", ["full", "delta"])
def test_an_audit_finds_the_rows_whose_mark_is_missing(
    tmp_path: Path, kind: asyncckpt.options.SaveKind, caplog: pytest.LogCaptureFixture
) -> None:
    table = filled_table()
    with Saver(
        path=tmp_path, hashtables={"user": table}, deltas=ALWAYS, debug=asyncckpt.DebugOptions(audit=True)
    ) as saver:
        save(saver, 1)
        write(table, torch.tensor([5]), 2.0)
        result = save(saver, 2, kind=kind)
        assert result.missed_ids == {}
        rows = table.lookup(torch.tensor([8, 9]), insert=False)
        table.embedding.numpy()[rows] = 7.0  # Nobody was told, torch neither.
        result = save(saver, 3, kind=kind)
        assert {name: sorted(ids) for name, ids in result.missed_ids.items()} == {"user": [8, 9]}
        assert "2 rows of table 'user' were changed without a mark" in caplog.text
        table.touch(rows)
        table.embedding.numpy()[rows] = 8.0
        assert save(saver, 4, kind=kind).missed_ids == {}
    for step in (3, 4):
        assert loaded(tmp_path, step)[8][:4] == ((7.0,) * 4 if step == 3 else (8.0,) * 4)
    assert loaded(tmp_path, 4) == rows_of(table)
