"""Run one test of a suite by hand, to see that it fails."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from asyncckpt.errors import CheckpointError
from asyncckpt.testing import TableSuite

FAILURES = (AssertionError, CheckpointError)


def run_one(suite: TableSuite, test: str, tmp_path: Path) -> None:
    """Call a test with the first value of everything it is parametrised with."""
    run = getattr(suite, test)
    arguments: dict[str, Any] = {}
    for mark in getattr(run, "pytestmark", ()):
        name, values = mark.args
        arguments[name] = next(iter(values))
    if "tmp_path" in inspect.signature(run).parameters:
        tmp_path.mkdir(exist_ok=True)
        arguments["tmp_path"] = tmp_path
    run(**arguments)
