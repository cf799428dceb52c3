"""What a rank waits for when it closes can be interrupted."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from asyncckpt.coordination.messages import Limits
from asyncckpt.engine.ranks.saver_ranks import Ranks
from asyncckpt.signals import uninterrupted

DEADLINE_S = 60.0


def test_the_wait_for_announcements_looks_for_signals() -> None:
    anything: Any = None
    ranks = Ranks(anything, Limits(begin_s=DEADLINE_S, silence_s=DEADLINE_S), anything)
    ranks.announcing = [threading.Event()]
    timer = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), uninterrupted:
        ranks.wait_announced()
    timer.join()
    assert time.monotonic() - began < DEADLINE_S
