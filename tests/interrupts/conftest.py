"""Takes one protection away, for the controls: that of the function named in ASYNCCKPT_UNPROTECTED."""

from __future__ import annotations

import os
import sys

import pytest

from tests.interrupts.protections import without_protection

UNPROTECTED = os.environ.get("ASYNCCKPT_UNPROTECTED", "")


@pytest.fixture(autouse=True)
def protection(monkeypatch: pytest.MonkeyPatch) -> None:
    if UNPROTECTED:
        monkeypatch.setattr(*without_protection(UNPROTECTED))


_status = [0]


def pytest_sessionfinish(exitstatus: int) -> None:
    _status[0] = exitstatus


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    if UNPROTECTED:  # Threads may wait for ever for what is held now.
        sys.stdout.flush()
        os._exit(_status[0])
