"""Put signal handlers off while something is taken, changed or given back.

Python runs signal handlers on the main thread, between two bytecodes, and what they raise comes out there: after the
call that took a lock and before the line that notes it, in the middle of a growth, inside a `finally`. No order of
lines closes all of these gaps, least of all in other people's code. So:

1. A call that takes, changes or gives back something runs under `with uninterrupted:`. On the main thread, signals with
   a handler written in Python get one that only notes them. On other threads nothing happens: no handler runs there.
   Only Python's handler changes, not the action of the system, with its flags and perhaps a handler of C before it.
2. Where such a call waits, it waits in short steps (`wait_in_steps`) and calls `uninterrupted.look()` in between: what
   was noted is handled there, and what the handlers raise ends the call, whose cleanup is still protected.
3. When the outermost block ends, the handlers are set back, and what was noted is handled: by then, all is given back,
   or belongs to somebody else, such as the background.

A second Ctrl-C during the cleanup waits for its end like the first one. Work that takes long without a wait, such as a
large capture, is not interrupted in the middle.

A Guard is a lock for a few lines that a destructor, a signal handler or a fork cannot turn into a wait without an end.
The collector runs destructors between any two lines of a thread too, also while it holds a lock. What they call may
want the same lock, or wait for a thread that does. So:

1. A thread that holds a guard and asks for it once more gets a UsageError at once, instead of a deadlock.
2. Before a wait for other threads, `check_holds_none` refuses one on a thread that holds any guard.
3. Finalizers of this library must not fail. They enter by `again`, and do there only what is right in the middle of
   what others do under that guard; or they leave the work to whoever holds it (storage/owner_lock.py).
4. A thread for what others wait for is started outside of every guard, since it may need them before it says that it
   has begun; but within one of its own, so that what runs meanwhile waits for nobody.
5. In a forked child all guards are free: the threads that held them are not there.
6. While the main thread holds a guard, handlers of signals are put off: an interrupt leaves none held.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from asyncckpt.errors import UsageError
from asyncckpt.system import register_at_fork

if TYPE_CHECKING:
    from threading import _RLock as _OwnedLock
else:
    _OwnedLock = type(threading.RLock())

# The functions of C below those of `signal`, which convert to enums and take ten times as long.
_signal: Any = import_module("_signal")
_handler_of, _set_handler = _signal.getsignal, _signal.signal

P = ParamSpec("P")
T = TypeVar("T")

STEP_S = 0.05
# Handlers of these belong to the instruction, or the decision, at which they come.
_FAULTS = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS", "SIGKILL", "SIGSTOP")
_REAL_TIME = getattr(signal, "SIGRTMIN", signal.NSIG)  # From here on nobody's in Python, and as many as all others.
_NUMBERS = tuple(
    sorted({int(n) for n in signal.valid_signals() if n < _REAL_TIME} - {getattr(signal, n, 0) for n in _FAULTS})
)
# Windows has neither actions nor this.
_sigaction: Any = ctypes.PyDLL(None).sigaction if hasattr(signal, "siginterrupt") else lambda *_: 0
_Action = ctypes.c_char * 512  # No system's is as large.


class Uninterrupted:
    """A block, or a function, that no signal handler interrupts; see the module. May be nested."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._depth = 0
        self._set_back: list[tuple[int, Any, Any]] = []
        self._noted: list[int] = []
        self._late: list[BaseException] = []  # What handlers have raised while others were put off.
        self._noter = self._note

    def __enter__(self) -> None:
        if threading.get_ident() == self._main:
            self._depth += 1
            while self._depth == 1:
                try:
                    self._put_off()
                    break
                except BaseException as error:  # The handler of a signal whose turn had not come.
                    self._late.append(error)

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == self._main:
            if self._depth == 1:
                self._end()
            elif self._depth:  # Else this is a child, forked in the block.
                self._depth -= 1

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Return a function that runs this one as such a block."""

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with self:
                return function(*args, **kwargs)

        return run

    def look(self, given_up: threading.Condition | None = None) -> None:
        """Handle here what was noted. Raises what the handlers raise; the block goes on to be protected.

        given_up: a lock that the caller holds and that handlers shall not wait for, nor those whom they wait for.
        UsageError in a child that a handler has forked and that returns: the threads it would wait for are not there.
        """
        if not (self._noted or self._late) or threading.get_ident() != self._main:
            return
        pid = os.getpid()
        if given_up is not None:
            given_up.release()
        try:
            self._handle()
        finally:
            if given_up is not None:
                given_up.acquire()
        if pid != os.getpid():
            raise UsageError(
                "a signal handler forked a child, which would continue its parent's call", hint="end it in the handler"
            )

    def _put_off(self) -> None:
        for number in _NUMBERS:
            handler = _handler_of(number)
            # Else it is SIG_DFL, SIG_IGN, or a handler that is not Python's.
            if callable(handler) and handler is not self._noter:
                action = _Action()
                _sigaction(number, None, action)
                self._set_back.append((number, handler, action))
                _set_handler(number, self._noter)
                _sigaction(number, action, None)

    def _note(self, number: int, _: object) -> None:
        self._noted.append(number)

    def _end(self) -> None:
        try:
            while self._set_back:
                number, handler, action = self._set_back[-1]
                found = _handler_of(number)
                if found is self._noter or found is handler:  # Else somebody has set another one meanwhile.
                    _set_handler(number, handler)
                    _sigaction(number, action, None)
                self._set_back.pop()
            self._depth = 0
        except BaseException:  # A signal came that is not put off any more.
            self._end()
            raise
        if self._noted or self._late:
            self._handle()

    def _handle(self) -> None:
        handlers = {number: handler for number, handler, _ in self._set_back}
        try:
            while self._noted:
                number = self._noted.pop(0)
                handler = handlers.get(number) or _handler_of(number)
                if callable(handler):
                    handler(number, sys._getframe())
        except BaseException:
            if self._noted:
                self._handle()
            raise
        if self._late:
            raise self._late.pop()

    def _renew_in_child(self) -> None:
        """End the block, whose thread may not be here: what is asked to end the child shall be heard."""
        self._main = threading.get_ident()
        self._noted.clear()
        self._late.clear()
        self._end()


uninterrupted = Uninterrupted()
register_at_fork(after_in_child=uninterrupted._renew_in_child)


@uninterrupted
def wait_until_done(future: Future[Any], timeout: float) -> bool:
    """Wait in steps for a future; return whether it is done."""
    return wait_in_steps(lambda seconds: not wait([future], seconds).not_done, timeout)


def check_timeout(timeout: Any) -> None:
    """Check for seconds that a wait can take, or None. UsageError."""
    if timeout is None or (type(timeout) in (int, float) and 0 <= timeout <= threading.TIMEOUT_MAX):
        return
    from asyncckpt.arguments import check_seconds  # It says what is wrong.

    check_seconds("timeout", timeout)


@uninterrupted
def wait_in_steps(wait: Callable[[float], T], timeout: float) -> T:
    """Return wait(seconds) once that is true, or after `timeout` seconds; between the steps, signals are handled."""
    until = time.monotonic() + timeout
    while True:
        left = until - time.monotonic()
        done = wait(max(0.0, min(left, STEP_S)))
        if done or left <= STEP_S:
            return done  # Without a look: what was waited for may be taken now.
        uninterrupted.look()


# -- guards ------------------------------------------------------------------------------------------------------------

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
