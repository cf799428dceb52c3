"""A plugin of pytest that lets threads begin late, and jobs and tasks begin and end late, at random.

With it whatever needs luck fails: code that looks twice at what another thread changes between, tests that are right
only while the background is faster than they are. `make test-delays` loads it.
"""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import pytest

from asyncckpt.engine.process import background
from asyncckpt.pipeline import threads

SECONDS_MAX = 0.05
SHARE = 0.4


def pytest_configure(config: pytest.Config) -> None:
    choices = random.Random(int(os.environ.get("ASYNCCKPT_DELAYS", "0")))

    def nap() -> None:
        if choices.random() < SHARE:
            time.sleep(SECONDS_MAX * choices.random())

    real_task, real_job, real_thread = threads._Task.run, background._run_job, threading.Thread.run
    real_begin = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def run_task(task: threads._Task) -> None:
        nap()
        call = task.call  # What it holds is held until then.
        real_task(task)
        nap()
        del call

    async def run_job(*arguments: Any) -> None:
        nap()
        await real_job(*arguments)
        nap()

    def run_thread(thread: threading.Thread) -> None:
        nap()
        real_thread(thread)

    def begin_thread(thread: threads._Thread) -> None:
        nap()  # Whoever has started it has not waited for this.
        real_begin(thread)

    threads._Task.run = run_task  # type: ignore[method-assign]
    background._run_job = run_job
    threading.Thread.run = run_thread  # type: ignore[method-assign]
    threads._Thread._bootstrap_inner = begin_thread  # type: ignore[attr-defined]
