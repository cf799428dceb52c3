"""Calls of the operating system that fail in turn."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncckpt.errors import CheckpointError, IndeterminateError

CALLS_MAX = 200


def fail_in_turn(call: str, act: Callable[[], object], made: Path, *beside: Path) -> int:
    """Fail each call of a function of `os` in turn, until there is none left; nothing is left but what was beside.

    What is made may be there when the last sync behind its rename has failed, in doubt. Returns how many have failed.
    """
    for failing in range(CALLS_MAX):
        count, real = iter(range(1000)), getattr(os, call)

        def fail(*arguments: Any, _real: Any = real, _at: int = failing, _count: Any = count, **more: Any) -> Any:
            if str(arguments[0]).startswith("/proc") or next(_count) != _at:
                return _real(*arguments, **more)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, call, fail)
            try:
                act()
            except CheckpointError as raised:
                error = raised
            else:
                break
        if left := [path for path in made.parent.iterdir() if path not in beside]:
            assert (call, left, type(error)) == ("fsync", [made], IndeterminateError)
            assert error.resolve()
            break
    assert [path for path in made.parent.iterdir() if path not in beside] == [made]
    return failing
