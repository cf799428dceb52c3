"""What a save asks of devices: copies listed while it captures, an arena pinned as far as they write to it, and steps
of optimizers that wait for the copies, so that forward and backward need not.

Parameters and the state of an optimizer change in its step only, if its owner says so. A hook before the step lets the
current streams wait until they are copied; everything else of a state is waited for at the save.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from asyncckpt.devices.contract import Runtime
from asyncckpt.devices.current_runtime import runtime
from asyncckpt.devices.host_copies import NO_MEMORY, HostCopies, Pending
from asyncckpt.engine.process.log import log_warning
from asyncckpt.errors import DeviceError
from asyncckpt.native import U64
from asyncckpt.options import SaveOptions
from asyncckpt.staging.arena import Arena
from asyncckpt.staging.pool import pool


def host_copies(options: SaveOptions, stepped: StepFences | None = None) -> HostCopies:
    """Return an empty list of copies for one save."""
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
    try:
        return copies.launch(reachable=arena.pinned_pieces)
    finally:
        arena.writer = copies.pending


def pin(arena: Arena, begin: int, end: int, runtime: Runtime, *, limit_bytes: int | None) -> None:
    """Pin bytes [begin, end) of an arena; a warning says so when they are not, one for each reason."""
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


class StepFences:
    """The optimizers of one Saver. Hooks go when it does."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        self._optimizers = list(optimizers)
        self._pending: list[Pending] = []
        own = weakref.ref(self)

        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            fences = own()
            if fences is not None:
                fences.wait()

        for optimizer in self._optimizers:
            handle = optimizer.register_step_pre_hook(before_step)
            weakref.finalize(self, handle.remove).atexit = False

    def memory(self) -> U64:
        """Return (address, bytes) of all tensors that only steps change, uint64 [n, 2]."""
        tensors = [tensor for item in self._optimizers for tensor in _tensors(item) if not tensor.is_meta]
        found = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
        return np.array(found, dtype=np.uint64).reshape(-1, 2)

    def expect(self, pending: Pending) -> None:
        """Let the next step wait for these copies, on the device."""
        self._pending = [item for item in self._pending if item.devices]
        if self._optimizers and pending.devices:
            self._pending.append(pending)

    def wait(self) -> None:
        """Let the current streams of this thread wait for them."""
        for pending in self._pending:
            pending.fence()


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield _local(parameter)
            state = optimizer.state.get(parameter, {})
            yield from (_local(value) for value in state.values() if isinstance(value, torch.Tensor))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a DTensor holds on this rank."""
    local = getattr(tensor, "_local_tensor", tensor)
    assert isinstance(local, torch.Tensor)
    return local
