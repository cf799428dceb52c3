"""Lists that tests go through item by item: each EVERY-th is taken, all of them by default.

`.ci/run` takes each fourth, which ones differs from list to list, so that what it shows of one kind of save it shows of
another place of the next; `make test-faults` and `make test-interrupts` take all.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from typing import TypeVar

EVERY = int(os.environ.get("ASYNCCKPT_EVERY", "1"))
T = TypeVar("T")


def share_of(items: Iterable[T], name: str, *, every: int = 1) -> list[T]:
    """Return each n-th item, where n is EVERY, or `every` if that is more; which is the first depends on the name."""
    step = max(EVERY, every)
    listed = list(items)
    return listed[zlib.crc32(name.encode()) % min(step, max(1, len(listed))) :: step]
