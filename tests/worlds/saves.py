"""One save by a Saver of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import asyncckpt

WAIT_S_MAX = 60.0


def save_one(path: Path | str, step: int = 1, *, staged: bool = False, **options: Any) -> asyncckpt.SaveResult:
    """Save a step in the call, or staged, by a Saver that is closed then."""
    with asyncckpt.Saver(path=path, **options) as saver:
        return saver.save_async(step).result(WAIT_S_MAX) if staged else saver.save(step)
