"""Put signal handlers off while something is taken, changed or given back.

Python runs signal handlers on the main thread, between two bytecodes, and what they raise comes out there: behind the
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
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

from asyncckpt.errors import UsageError
from asyncckpt.system import register_at_fork

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
                "a signal handler forked a child, which goes on with its parent's call", hint="end it in the handler"
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
