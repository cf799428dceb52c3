"""A thread of a pool that waits for a task of that pool is a bug. In the suite such a wait raises."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from asyncckpt.engine.process.background import background
from asyncckpt.pipeline.threads import IdleEndingThreads


class _Watched(Future[Any]):
    """The future of a task, which knows its pool."""

    pool: IdleEndingThreads

    def result(self, timeout: float | None = None) -> Any:
        self._check()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._check()
        return super().exception(timeout)

    def _check(self) -> None:
        if not self.done():
            check_wait(self.pool)


def check_wait(pool: IdleEndingThreads) -> None:
    if pool.is_current_thread():
        raise RuntimeError(f"a thread of the pool {pool._name!r} waits for a task of that pool")


def watch() -> None:
    """Let all pools refuse such waits from now on."""
    real_submit = IdleEndingThreads.submit

    def submit(pool: IdleEndingThreads, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if asyncio._get_running_loop() is not None and not background.is_current_thread():
            check_wait(pool)  # Whoever runs the loop waits until it ends.
        future = real_submit(pool, fn, *args, **kwargs)
        future.__class__ = _Watched
        assert isinstance(future, _Watched)
        future.pool = pool
        return future

    IdleEndingThreads.submit = submit  # type: ignore[method-assign]
