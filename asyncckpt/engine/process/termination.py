"""SIGTERM, put off until training has come to the end of a step and has saved it.

#   from       to         done by   when
#   -          listening  listen    on the main thread, where SIGTERM has its usual action or a handler of Python's
#   listening  asked      _note     SIGTERM; further ones change nothing, for launchers and schedulers send several
#   asked      listening  leave     the step is saved: the handler from before is called, and has returned
#   asked      -          _note     SIGTERM of its own, in a block of `waiting` that has lasted too long: SystemExit
#   any        -          end

A handler that is called when nobody listens any more, or in a forked child, passes the signal on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

EXIT_STATUS = 128 + signal.SIGTERM


def exit_as_terminated() -> NoReturn:
    """End the process as SIGTERM does, but by an exception: `with` blocks and handlers of the exit run."""
    raise SystemExit(EXIT_STATUS)


class Termination:
    """See the table. Used by one thread; not in an `uninterrupted` block, which has replaced the handlers."""

    def __init__(self) -> None:
        self.is_asked = False
        self._previous: Any = None
        self._handler = self._note
        self._pid: int | None = None  # While it listens.
        self._waits_s: float | None = None
        self._timer: threading.Timer | None = None
        self._is_over = False

    def listen(self) -> None:
        """Take SIGTERM from now on; does nothing elsewhere than in the table."""
        if self._pid is not None or threading.current_thread() is not threading.main_thread():
            return
        previous = signal.getsignal(signal.SIGTERM)
        if previous is not None and previous is not signal.SIG_IGN:
            self._previous, self._pid = previous, os.getpid()
            signal.signal(signal.SIGTERM, self._handler)

    @property
    def ends_process(self) -> bool:
        """Whether `leave` would end the process, and no handler from before could let it go on."""
        return self.is_asked and not callable(self._previous)

    @contextlib.contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """Wait for others in here; SystemExit `seconds` after SIGTERM, if it ends the process: they may be gone."""
        self._waits_s = seconds
        try:
            yield
        finally:
            self._waits_s = None
            if self._timer is not None:
                self._timer.cancel()

    def leave(self, *, at_exit: bool = False) -> None:
        """End the process now that the step is saved: by the handler from before, or SystemExit where there was none.

        Returns if that handler does. at_exit: the interpreter ends, where SystemExit is only printed: at once, as
        SIGTERM does, but with the output that was printed.
        """
        self.is_asked = False
        if callable(self._previous):
            self._previous(signal.SIGTERM, sys._getframe())
        elif at_exit:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(EXIT_STATUS)
        else:
            exit_as_terminated()

    def end(self) -> None:
        """Give the handler from before back, unless somebody else has set another one meanwhile."""
        if self._pid != os.getpid():
            return
        self._pid = None
        if signal.getsignal(signal.SIGTERM) == self._handler and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pid == os.getpid():
            self.is_asked = True
            if self._waits_s is not None and self.ends_process:
                self._end_in(self._waits_s)
        elif callable(self._previous):
            self._previous(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _end_in(self, seconds: float) -> None:
        if self._is_over:
            exit_as_terminated()
        if self._timer is None:
            self._timer = threading.Timer(seconds, self._be_over)
            self._timer.daemon = True
            self._timer.start()

    def _be_over(self) -> None:
        self._is_over = True
        if self._waits_s is not None:
            os.kill(os.getpid(), signal.SIGTERM)  # A handler that raises ends a wait of the main thread.
