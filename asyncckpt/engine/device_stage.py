"""What a save asks of devices: copies listed while it captures, an arena pinned as far as they write to it."""

from __future__ import annotations

from asyncckpt.devices.chosen import runtime
from asyncckpt.devices.contract import Runtime
from asyncckpt.devices.host_copies import NO_ADDRESSES, HostCopies, Pending
from asyncckpt.engine.messages import log_warning
from asyncckpt.engine.step_fences import StepFences
from asyncckpt.errors import DeviceError
from asyncckpt.options import SaveOptions
from asyncckpt.staging.arena import Arena
from asyncckpt.staging.pool import pool


def host_copies(options: SaveOptions, stepped: StepFences | None = None) -> HostCopies:
    """An empty list of copies for one save."""
    found = runtime()
    return HostCopies(
        found,
        scratch_bytes=options.device_scratch_bytes,
        streams=options.streams,
        stepped=NO_ADDRESSES if found is None or stepped is None else stepped.addresses(),
    )


def launch(copies: HostCopies, arena: Arena, options: SaveOptions) -> Pending:
    """Queue all copies into an arena, pinned if it may be. As HostCopies.launch."""
    begin, end = copies.targets
    if copies.runtime is None or begin == end:
        return copies.launch()
    pin(arena, begin - arena.address, end - arena.address, copies.runtime, limit_bytes=options.pinned_memory_limit)
    return copies.launch(reachable=[arena.pinned])


def pin(arena: Arena, begin: int, end: int, runtime: Runtime, *, limit_bytes: int | None) -> None:
    """Pin bytes [begin, end) of an arena; a warning tells when they are not, and the trainer waits longer."""
    total = pool.pinned_bytes() - arena.pinned[1] + arena.pinned_bytes_with(begin, end)
    if limit_bytes is not None and total > limit_bytes:
        log_warning("the trainer waits for its devices: %d pinned bytes are more than pinned_memory_limit", total)
        return
    try:
        arena.pin(begin, end, runtime)
    except DeviceError as error:
        log_warning("the trainer waits for its devices: %s", error)
