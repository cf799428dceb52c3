"""Locks for a few lines that a destructor, a signal handler or a fork cannot turn into a wait without an end.

The collector runs destructors, and Python runs signal handlers, between any two lines of a thread, also while it holds
a lock. What they call may want the same lock, or wait for a thread that does. So:

1. Whoever holds a guard and asks for it once more gets a UsageError at once, instead of a deadlock.
2. Before a wait for other threads, `check_holds_none` refuses one on a thread that holds any guard.
3. Finalizers of this library must not fail. They enter by `again`, and do there only what is right in the middle of
   what others do under that guard; or they leave the work to whoever holds it (storage/owner_lock.py).
4. Whoever has to start a thread for what others wait for does so outside of every guard, for that thread may need
   them before it says that it has begun; but within one of its own, so that what runs meanwhile waits for nobody.
5. In a forked child all guards are free: the threads that held them are not there.
6. While the main thread holds a guard, handlers of signals are put off (signals.py): an interrupt leaves none held.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from asyncckpt.errors import UsageError
from asyncckpt.signals import uninterrupted
from asyncckpt.system import register_at_fork

if TYPE_CHECKING:
    from threading import _RLock as _OwnedLock
else:
    _OwnedLock = type(threading.RLock())

_HINT = "a destructor or a signal handler cannot do this: leave it to the code that follows"
# By identity. Plain dictionaries are copied at once; a WeakSet may change while it is read.
_guards: weakref.WeakValueDictionary[int, Guard] = weakref.WeakValueDictionary()


class Guard(_OwnedLock):  # type: ignore[misc]  # The stubs call it final, which it is not.
    """A lock for use in a `with` statement, also as the lock of a Condition. See above."""

    def __init__(self) -> None:
        super().__init__()
        _guards[id(self)] = self

    def __enter__(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it. UsageError on the thread that holds it."""
        if self._is_owned():  # type: ignore[attr-defined]  # As Condition asks.
            raise UsageError("the library was called in the middle of a call on the same thread", hint=_HINT)
        uninterrupted.__enter__()
        is_taken = False
        try:
            is_taken = self.acquire(blocking, timeout)
        finally:
            if not is_taken:
                if self.is_held_here():  # What has been raised came behind it.
                    self.release()
                uninterrupted.__exit__()
        return is_taken

    def __exit__(self, *error: object) -> None:
        self.release()
        uninterrupted.__exit__()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Take it, also on the thread that holds it already."""
        with uninterrupted:
            self.acquire()
            try:
                yield
            finally:
                self.release()

    def is_held_here(self) -> bool:
        """Return whether the current thread holds it."""
        held: bool = self._is_owned()  # type: ignore[attr-defined]
        return held


def check_holds_none(what: str, *, but: Guard | None = None) -> None:
    """Raise UsageError on a thread that holds a guard and is about to wait for other threads, which may need it.

    but: one that is given up for the time of the wait.
    """
    for reference in _guards.valuerefs():
        guard = reference()
        if guard is not None and guard is not but and guard.is_held_here():
            raise UsageError(f"waiting for {what} in the middle of another call may have no end", hint=_HINT)


def _free_all() -> None:
    for reference in _guards.valuerefs():
        guard = reference()
        if guard is not None:
            guard._at_fork_reinit()  # type: ignore[attr-defined]  # As the locks of threading do.


register_at_fork(after_in_child=_free_all)
