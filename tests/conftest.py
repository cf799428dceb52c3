"""What every test relies on, however the suite was started."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Which core runs makes no difference to what these show, or they run both themselves. Files and folders.
ONCE = (
    "adapters",
    "bad_input/test_arbitrary_bytes.py",
    "bad_input/test_case_table.py",
    "bad_input/test_manifest.py",
    "bad_input/test_values_and_names.py",
    "bench",
    "demo",
    "docs",
    "embcache",
    "test_floors.py",
    "testing/test_documented_suite.py",
    "testing/test_tiny_marks.py",
    "testing/test_tiny_tables.py",
    "unit/cli",
    "unit/format",
    "unit/native",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs no second run on the twin."""
    for item in items:
        path = item.path.relative_to(TESTS)
        if any(path.is_relative_to(once) for once in ONCE):
            item.add_marker(pytest.mark.once)


@pytest.fixture(scope="session", autouse=True)
def forbid_own_waits() -> None:
    """A thread of a pool that waits for a task of that pool is a bug, also where the pool mends it."""
    from asyncckpt.pipeline.threads import IdleEndingThreads  # Here, for what is collected may set the environment.

    IdleEndingThreads.forbids_own_waits = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a failed test held on a simulated device may be shown."""
    memory = sys.modules.get("tests.simulated_device.memory")
    if call.excinfo is not None and memory is not None:
        memory.open_all_for_good()
    return (yield)


# A shell without job control starts background commands with SIGINT ignored, and children inherit that; the tests of
# interrupts need Python's own handler. Children get the default again, for an exec resets what is handled.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
