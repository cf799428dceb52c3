"""Takes one protection away, for the controls: that of the function named in ASYNCCKPT_UNPROTECTED."""

from __future__ import annotations

import os
import sys
from importlib import import_module

import pytest

UNPROTECTED = os.environ.get("ASYNCCKPT_UNPROTECTED", "")


@pytest.fixture(autouse=True)
def protection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `module:Class.name` by the function without its decorator, `module:name` by a block without effect."""
    if UNPROTECTED:
        module, _, name = UNPROTECTED.partition(":")
        *owner, attribute = name.split(".")
        found = import_module(module)
        for part in owner:
            found = getattr(found, part)
        plain = getattr(getattr(found, attribute), "__wrapped__", None)
        monkeypatch.setattr(found, attribute, _Nothing() if plain is None else plain)


class _Nothing:
    """A block that protects nothing."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def look(self) -> None: ...


_status = [0]


def pytest_sessionfinish(exitstatus: int) -> None:
    _status[0] = exitstatus


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    if UNPROTECTED:  # Threads may wait for ever for what is held now.
        sys.stdout.flush()
        os._exit(_status[0])
