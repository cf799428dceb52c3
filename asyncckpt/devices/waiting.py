"""Wait on the host for a device, with a deadline: a hanging stream of the trainer would block all saves."""

from __future__ import annotations

import time
from collections.abc import Callable

from asyncckpt.errors import DeadlineError
from asyncckpt.options import DEVICE_DEADLINE_S

PAUSE_S_MIN, PAUSE_S_MAX = 50e-6, 2e-3


def wait_until(is_done: Callable[[], bool], *, deadline_s: float = DEVICE_DEADLINE_S) -> None:
    """Block this thread, not the interpreter, until `is_done`. Raises DeadlineError after deadline_s seconds."""
    until = time.monotonic() + deadline_s
    pause = PAUSE_S_MIN
    while not is_done():
        if time.monotonic() >= until:
            raise DeadlineError(
                f"a device was not done with its copies after {deadline_s} s",
                hint="a stream of the trainer may hang: copies wait for what was queued before them",
            )
        time.sleep(pause)
        pause = min(2 * pause, PAUSE_S_MAX)
