"""A thread of a pool that waits for a task of that pool is a bug. In the suite such a wait raises."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from asyncckpt.pipeline.threads import IdleEndingThreads

are_forbidden = True


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
    if are_forbidden and pool.is_current_thread():
        raise RuntimeError(f"a thread of the pool {pool._name!r} waits for a task of that pool")


def watch() -> None:
    """Let all pools refuse such waits from now on."""
    real_submit, real_submit_behind = IdleEndingThreads.submit, IdleEndingThreads.submit_behind

    def submit(pool: IdleEndingThreads, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if asyncio._get_running_loop() is not None:
            check_wait(pool)
        return real_submit(pool, fn, *args, **kwargs)

    def submit_behind(pool: IdleEndingThreads, call: Callable[[], Any]) -> Future[Any]:
        future = real_submit_behind(pool, call)
        future.__class__ = _Watched
        assert isinstance(future, _Watched)
        future.pool = pool
        return future

    IdleEndingThreads.submit = submit  # type: ignore[method-assign]
    IdleEndingThreads.submit_behind = submit_behind  # type: ignore[method-assign]
