"""What a save asks of devices: copies that are listed while it captures, to an arena that is pinned for them."""

from __future__ import annotations

from functools import lru_cache

from asyncckpt.devices.contract import Runtime
from asyncckpt.devices.current_runtime import runtime
from asyncckpt.devices.host_copies import HostCopies, Pending
from asyncckpt.devices.stepped_memory import NOTHING_STEPPED, SteppedMemory
from asyncckpt.engine.process.log import log_warning
from asyncckpt.errors import DeviceError
from asyncckpt.options import SaveOptions
from asyncckpt.staging.pool import Arena, pool


class DeviceStage(HostCopies):
    """The copies of one save, of the host and of devices. stepped: memory that only steps of optimizers change."""

    def __init__(self, options: SaveOptions, stepped: SteppedMemory = NOTHING_STEPPED) -> None:
        self._options = options
        super().__init__(
            runtime(), scratch_bytes=options.device.scratch_bytes, streams=options.device.streams, stepped=stepped
        )

    def launch_into(self, arena: Arena) -> Pending:
        """Queue all copies into an arena, pinned if it may be. As HostCopies.launch."""
        begin, end = self.targets
        if self.runtime is None or begin == end:
            return self.launch()
        limit_bytes = self._options.device.pinned_memory_limit
        pin(arena, begin - arena.address, end - arena.address, self.runtime, limit_bytes=limit_bytes)
        try:
            return self.launch(reachable=arena.pinned_pieces)
        finally:
            arena.writer = self.pending


def pin(arena: Arena, begin: int, end: int, runtime: Runtime, *, limit_bytes: int | None) -> None:
    """Pin bytes [begin, end) of an arena; warn when they are not pinned, once for each reason."""
    total = pool.pinned_bytes() - arena.pinned[1] + arena.pinned_bytes_with(begin, end)
    if limit_bytes is not None and total > limit_bytes:
        _warn_once(f"more than the pinned_memory_limit of {limit_bytes} bytes would be pinned")
        return
    try:
        arena.pin(begin, end, runtime)
    except DeviceError as error:
        _warn_once(str(error))


@lru_cache(maxsize=100)
def _warn_once(why: str) -> None:
    log_warning("copies from devices go to memory that is not pinned, and the trainer waits for them: %s", why)
