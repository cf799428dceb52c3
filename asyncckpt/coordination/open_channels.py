"""Channels that are still open when the interpreter ends are closed then.

A training script may end right after its last save has committed, without closing anything. The ranks would then see
their channel break instead of the last message. This runs after all threads of saves have been joined.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class _Closes(Protocol):
    def close(self) -> None: ...


_open: weakref.WeakSet[_Closes] = weakref.WeakSet()


def close_at_exit(channel: _Closes) -> None:
    """Close a channel at the end of the interpreter, unless it is gone by then."""
    _open.add(channel)


def _close_all() -> None:
    for channel in list(_open):
        channel.close()


atexit.register(_close_all)
# A forked child shares the parent's connections; what it says on them would be nonsense.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_open.clear)
