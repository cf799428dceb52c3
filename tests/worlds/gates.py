"""Hold a save, or whatever calls what it is given, until a test lets it go on; or let it fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from asyncckpt.engine.process.save_lock import save_lock

WAIT_S_MAX = 60.0


class Gate:
    """Called by a save, as its filter or otherwise, it holds it until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self, blocks: Any = None) -> Any:
        self.reached.set()
        if not self._opened.wait(WAIT_S_MAX):  # No assert: these are left out by python -O.
            raise AssertionError("it was waited for in vain")
        return blocks

    def open(self) -> None:
        self._opened.set()

    def shut(self) -> None:
        self._opened.clear()
        self.reached.clear()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


def failing(blocks: Any) -> Any:
    """Fail as a filter."""
    raise RuntimeError("disk on fire")


def unchanged(blocks: Any) -> Any:
    """Change nothing, as a filter: so that there is a point at which one runs."""
    return blocks


def nothing(*_: Any, **__: Any) -> None:
    """Be what is left of a function that was taken away."""


@pytest.fixture(autouse=True)
def nothing_in_flight() -> Iterator[None]:
    """Whatever went wrong in a test, the next save and load of the process may begin."""
    yield
    assert save_lock.in_flight() == []
