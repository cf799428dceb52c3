"""What the classes that save and load have in common on an event loop, and at the end of a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

from asyncckpt.arguments import check_timeout
from asyncckpt.engine.process.event_loop import when_free
from asyncckpt.errors import closing_beside
from asyncckpt.options import BusyPolicy

C = TypeVar("C", bound="Closing")


class WaitsUntilFree:
    """What may have to wait for saves and loads in flight."""

    _busy: BusyPolicy

    async def when_free(self, timeout: float | None = None) -> None:
        """Wait, without stopping the event loop, until no save or load of this process is in flight.

        A save_async or load_async that follows without another await finds it free, unless another thread was faster.
        DeadlineError after `timeout` seconds (None: the deadline of on_busy).
        """
        check_timeout(timeout)
        await when_free(self._busy.deadline if timeout is None else timeout)


class Closing(WaitsUntilFree, ABC):
    """What is closed at the end of a `with` or `async with` block."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close without stopping the event loop."""

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with closing_beside(error, "closing the Saver raised"):
            self.close()

    async def __aenter__(self: C) -> C:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        with closing_beside(error, "closing the Saver raised"):
            await self.aclose()
