"""Tests of the schema and of the cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncckpt.format.dtypes import stored_dtype
from asyncckpt.model.owned_ids import owned_mask
from asyncckpt.model.table import ID_COLUMN, HasCompanions, OwnsIds, Role, Table
from asyncckpt.model.table_shard import is_shard
from asyncckpt.testing.case import TableCase, ends_soon, finish, in_thread, start
from asyncckpt.testing.cuts import cut_image, ended


class SchemaTests(TableCase):
    """The schema and the other facts of the table."""

    def test_table_has_the_protocol(self) -> None:
        table = self.make_table()
        assert isinstance(table, Table), f"{type(table).__name__} lacks a member of asyncckpt.table.Table"
        assert isinstance(table.name, str)
        assert table.name
        assert is_shard(table.shard), f"shard {table.shard} is impossible"

    def test_schema_is_sound(self) -> None:
        columns = self.make_table().schema().columns
        assert len(columns) >= 2
        first = columns[0]
        assert (first.name, first.dtype, first.row_shape, first.role) == (ID_COLUMN, torch.int64, (), Role.ID)
        names = [column.name for column in columns]
        assert len(set(names)) == len(names), f"column names are not distinct: {names}"
        for column in columns:
            assert column.name
            assert "@" not in column.name, "'@' parts table and column in block names"
            assert isinstance(column.row_shape, tuple)
            assert all(type(size) is int and size >= 1 for size in column.row_shape), column
            assert (column.role is Role.ID) == (column is first)
            assert column.role is not Role.DENSE
            stored_dtype(column.dtype, owner=column.name)

    def test_schema_stays_the_same(self) -> None:
        table = self.make_table()
        before = table.schema()
        self.train_steps(table, range(2))
        assert table.schema() == before
        assert self.make_table().schema() == before

    def test_ids_belong_to_the_table(self) -> None:
        """By its own rule, if it has one, else by its shard."""
        table = self.trained()
        ids = self.image(table).ids
        if isinstance(table, OwnsIds):
            owned = table.owned(ids)
            assert owned.dtype == np.bool_
            assert owned.shape == ids.shape
        else:
            owned = owned_mask(ids, shard=table.shard)
        assert bool(owned.all()), f"the table holds ids of others: {ids[~owned].tolist()}"

    def test_companions_are_tables(self) -> None:
        table = self.make_table()
        if not isinstance(table, HasCompanions):
            pytest.skip("the table has no companions (it is no HasCompanions)")
        companions = table.companions()
        assert table.companions().keys() == companions.keys()
        for suffix, companion in companions.items():
            assert suffix
            assert "@" not in suffix
            assert isinstance(companion, Table)
            assert companion is table.companions()[suffix], "a companion is another object at every call"

    def test_contents_have_the_columns_of_the_schema(self) -> None:
        """Tests the suite's own hooks: other tests do not see what they leave out."""
        table = self.trained()
        assert sorted(self.contents(table)) == sorted(column.name for column in table.schema().columns)
        image = self.image(table)
        assert len(image), "training leaves no rows"
        again = self.image(self.trained())
        assert again.difference(image) is None, "train depends on more than table, step and seed"
        self.train_steps(table, range(4, 6))
        for name, rows in self.image(table).columns.items():
            untouched = rows.shape == image.columns[name].shape and bool((rows == image.columns[name]).all())
            assert not untouched, f"training never changes column {name!r}: no test would see it lost"


class CutTests(TableCase):
    """A frozen table."""

    def test_cut_describes_its_rows(self) -> None:
        table = self.trained()
        count = len(self.image(table))
        with ended(table.begin_cut()) as cut:
            runs = cut.runs
            assert cut.rows_count == count
            assert runs.dtype == np.int64
            assert runs.ndim == 2
            assert runs.shape[1] == 2
            assert bool((runs[:, 0] < runs[:, 1]).all()), "a run is empty"
            assert bool((runs[1:, 0] >= runs[:-1, 1]).all()), "runs are not ascending"
            assert int((runs[:, 1] - runs[:, 0]).sum()) == count
            for column in table.schema().columns:
                storage = cut.column(column.name)
                assert storage.dtype is column.dtype
                assert tuple(storage.shape[1:]) == column.row_shape
                assert storage.is_contiguous()
                assert len(storage) >= (int(runs[-1, 1]) if len(runs) else 0)

    def test_cut_holds_the_contents(self) -> None:
        """Every column, all of them in the row order of the ids."""
        table = self.trained()
        for step in range(4, 8):
            expected = self.image(table)
            with ended(table.begin_cut()) as cut:
                cut_image(cut, table.schema()).assert_equals(expected, what="the cut")
            self.train(table, step, 1)

    def test_cut_of_a_new_table(self) -> None:
        table = self.make_table()
        expected = self.image(table)
        with ended(table.begin_cut()) as cut:
            assert cut.rows_count == len(expected)
            cut_image(cut, table.schema()).assert_equals(expected, what="the cut of a new table")

    @pytest.mark.parametrize("ok", [True, False])
    def test_a_cut_changes_nothing(self, ok: bool) -> None:
        """Neither the rows nor their places: flushing a level for the cut changes `internals`."""
        table = self.trained()
        expected, inside = self.image(table), self.inside(table)
        cut = table.begin_cut()
        cut.fence()
        cut.end(ok)
        self.assert_holds(table, expected, what="the table after a cut")
        assert self.inside(table) == inside, "the internals changed in a cut"

    def test_cut_does_not_change_before_the_fence(self) -> None:
        table = self.trained()
        expected, schema = self.image(table), table.schema()
        match self.cut_kind:
            case "caller":
                pytest.skip("the caller keeps training away from a cut of this table (cut_kind)")
            case "copies":
                with ended(table.begin_cut()) as cut:
                    self.train_steps(table, range(4, 7))
                    cut_image(cut, schema).assert_equals(expected, what="the cut changed with the table")
            case "waits":
                with ended(table.begin_cut()) as cut:
                    training = start(lambda: self.train_steps(table, range(4, 7)))
                    assert not ends_soon(training[0]), "training continued between begin_cut and fence"
                    cut_image(cut, schema).assert_equals(expected, what="the table changed in its cut")
                finish(training)

    def test_fence_releases_the_table(self) -> None:
        table = self.trained()
        expected = self.trained(steps=6)
        cut = table.begin_cut()
        cut.fence()
        in_thread(lambda: self.train_steps(table, range(4, 6)))
        cut.end(True)
        self.assert_holds(table, self.image(expected), what="a table trained between fence and end")

    def test_fence_and_end_may_come_from_another_thread(self) -> None:
        table = self.trained()
        cut = table.begin_cut()
        in_thread(cut.fence)
        in_thread(lambda: cut.end(True))
        in_thread(lambda: self.train(table, 4, 1))

    @pytest.mark.parametrize("ok", [True, False])
    def test_end_without_fence(self, ok: bool) -> None:
        table = self.trained()
        expected = self.image(table)
        table.begin_cut().end(ok)
        self.assert_holds(table, expected, what="the table after a cut that ended before its fence")
        in_thread(lambda: self.train(table, 4, 1))

    def test_fence_and_end_do_nothing_the_second_time(self) -> None:
        table = self.trained()
        first = table.begin_cut()
        first.fence()
        first.fence()
        first.end(True)
        second = table.begin_cut()
        first.fence()
        first.end(False)
        training = start(lambda: self.train(table, 4, 1))
        if self.cut_kind == "waits":
            assert not ends_soon(training[0]), "an old cut released the table that a new one holds"
        second.end(True)
        finish(training)
        self.assert_holds(table, self.image(self.trained(steps=5)), what="a table trained after two cuts")
