"""The contract of tables as tests: subclass TableSuite for a table of your own (docs/table-suite.md). Needs pytest."""

import pytest

# Before importing the modules with the tests, so that their asserts show values like those of test files.
for _module in ("case", "cuts", "cut_tests", "image", "level_tests", "mark_tests", "save_tests"):
    pytest.register_assert_rewrite(f"asyncckpt.testing.{_module}")

from asyncckpt.testing.case import CutKind, FailedLoad  # noqa: E402
from asyncckpt.testing.image import Contents  # noqa: E402
from asyncckpt.testing.suite import TableSuite  # noqa: E402

__all__ = ["Contents", "CutKind", "FailedLoad", "TableSuite"]
