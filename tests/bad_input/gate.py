"""Filters that hold a save, or fail, and waits."""

from __future__ import annotations

import threading
from typing import Any

DEADLINE_S = 60


def failing(blocks: Any) -> Any:
    raise ValueError("my reason")


def await_end_of_threads() -> None:
    """One that is about to end takes what is submitted next, and no other one is started."""
    for thread in threading.enumerate():
        if thread.name.startswith("asyncckpt") and not thread.daemon:
            thread.join(DEADLINE_S)
