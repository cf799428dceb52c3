"""The contract of tables as tests: subclass TableSuite for a table of your own (docs/table-suite.md). Needs pytest.

    class TestMyTable(TableSuite):
        def make_table(self) -> Table: ...
        def train(self, table, step, seed) -> None: ...
        def contents(self, table) -> Contents: ...

Modelled on zarr's `zarr.testing.store.StoreTests`: hooks declare in what a table may differ (see case.py), and only the
tests that these rule out are skipped, with a reason.
"""

import pytest

# Before importing the modules with the tests, so that their asserts show values like those of test files.
for _module in ("case", "cuts", "cut_tests", "image", "level_tests", "mark_tests", "save_tests"):
    pytest.register_assert_rewrite(f"asyncckpt.testing.{_module}")

from asyncckpt.testing.case import CutKind, FailedLoad  # noqa: E402
from asyncckpt.testing.cut_tests import CutTests, SchemaTests  # noqa: E402
from asyncckpt.testing.image import Contents  # noqa: E402
from asyncckpt.testing.level_tests import LevelTests  # noqa: E402
from asyncckpt.testing.mark_tests import MarkTests  # noqa: E402
from asyncckpt.testing.save_tests import LoadTests, SaveTests  # noqa: E402

__all__ = ["Contents", "CutKind", "FailedLoad", "TableSuite"]


class TableSuite(SchemaTests, CutTests, SaveTests, LoadTests, LevelTests, MarkTests):
    """The contract of asyncckpt.table.Table, Saver and Loader for one kind of table; subclass it with the hooks."""
