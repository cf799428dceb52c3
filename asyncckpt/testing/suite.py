"""TableSuite: the tests that every table and adapter passes.

    class TestMyTable(TableSuite):
        def make_table(self) -> Table: ...
        def train(self, table, step, seed) -> None: ...
        def contents(self, table) -> Contents: ...

Modelled on zarr's `zarr.testing.store.StoreTests`: hooks declare in what a table may differ (see case.py), and only the
tests that these rule out are skipped, with a reason.
"""

from __future__ import annotations

from asyncckpt.testing.cut_tests import CutTests, SchemaTests
from asyncckpt.testing.level_tests import LevelTests
from asyncckpt.testing.mark_tests import MarkTests
from asyncckpt.testing.save_tests import LoadTests, SaveTests


class TableSuite(SchemaTests, CutTests, SaveTests, LoadTests, LevelTests, MarkTests):
    """The contract of asyncckpt.table.Table, Saver and Loader for one kind of table; subclass it with the hooks."""
