"""What a save asks of devices: copies listed while it captures, an arena pinned as far as they write to it."""

from __future__ import annotations

from functools import lru_cache

from asyncckpt.devices.contract import Runtime
from asyncckpt.devices.current_runtime import runtime
from asyncckpt.devices.host_copies import NO_MEMORY, HostCopies, Pending
from asyncckpt.engine.process.log import log_warning
from asyncckpt.engine.save.step_fences import StepFences
from asyncckpt.errors import DeviceError
from asyncckpt.options import SaveOptions
from asyncckpt.staging.arena import Arena
from asyncckpt.staging.pool import pool


def host_copies(options: SaveOptions, stepped: StepFences | None = None) -> HostCopies:
    """An empty list of copies for one save."""
    found = runtime()
    return HostCopies(
        found,
        scratch_bytes=options.device.scratch_bytes,
        streams=options.device.streams,
        stepped=NO_MEMORY if found is None or stepped is None else stepped.memory(),
    )


def launch(copies: HostCopies, arena: Arena, options: SaveOptions) -> Pending:
    """Queue all copies into an arena, pinned if it may be. As HostCopies.launch."""
    begin, end = copies.targets
    if copies.runtime is None or begin == end:
        return copies.launch()
    limit_bytes = options.device.pinned_memory_limit
    pin(arena, begin - arena.address, end - arena.address, copies.runtime, limit_bytes=limit_bytes)
    return copies.launch(reachable=[arena.pinned])


def pin(arena: Arena, begin: int, end: int, runtime: Runtime, *, limit_bytes: int | None) -> None:
    """Pin bytes [begin, end) of an arena; a warning tells, once, when they are not."""
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
