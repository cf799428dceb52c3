"""Bring blocks to where they belong, by way of windows in memory.

For what cannot be read straight into place: rows that are scattered over a table, boxes of other form, blocks of which
only some is wanted; encoded blocks; strides; devices. Many small blocks share one window, and a large one takes
several; each block is read once, and its digest is taken over all of it. An encoded block is read whole, verified, then
decoded. boxes.py and scattered_rows.py say what becomes of a window's bytes.

Windows for devices are pinned, and there are two: one is read while the other is uploaded (devices/uploads.py).
So a load takes as long as the slower of disk and bus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Protocol

import numpy as np
import torch

from asyncckpt.devices.uploads import Uploads
from asyncckpt.format.manifest import BlockFacts
from asyncckpt.model.block import BlockSpec
from asyncckpt.native import core, paged
from asyncckpt.native.contract import U8, Digester


class BlockReader(Protocol):
    """What restore asks of the shard room: read blocks of the checkpoint by their numbers."""

    def add(self, number: int, address: int, *, begin: int, bytes: int) -> None:
        """Queue a read of bytes [begin, begin + bytes) of a block to an address."""
        ...

    def run(self) -> None:
        """Do all queued reads; whole blocks are verified."""
        ...

    def block(self, number: int) -> BlockFacts: ...
    def check(self, number: int, digest: bytes) -> None:
        """Raise CorruptError unless the block has this digest."""
        ...

    def pass_over(self, number: int) -> None:
        """Take note that nothing of a block counts: it is not going to be read."""
        ...

    @property
    def verify(self) -> bool: ...


WINDOW_BYTES = 64 << 20
DEVICE_TIMES = 2  # As large are windows for devices: a disk rests while the last block of a window is verified.


class Window(Protocol):
    """Bytes [begin, begin + bytes) of a block, and what becomes of them."""

    @property
    def begin(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def put(self, memory: U8, uploads: Uploads) -> None:
        """Bring what is wanted of these bytes to its place on the host, and list what goes to devices."""
        ...


class Scatter(Protocol):
    """A block, and where parts of it go."""

    @property
    def number(self) -> int: ...
    @property
    def targets(self) -> Iterable[torch.Tensor]: ...
    def windows(self, spec: BlockSpec, *, bytes_max: int, whole: bool) -> Iterable[Window]:
        """Return the windows of the block, ascending, of about bytes_max at most; a single element may be larger.

        whole: without gaps from begin to end, for a digest; else those that hold something wanted will do. An encoded
        block is one window.
        """
        ...


def scatter_all(items: Sequence[Scatter], reader: BlockReader, uploads: Uploads) -> None:
    """Read every block and put its parts in place; CorruptError naming a damaged one, DeviceError.

    What goes to devices is launched, but may be on its way still when this returns.
    """
    to_devices: list[Scatter] = []
    to_host: list[Scatter] = []
    for item in items:
        is_up = any(uploads.device_of(target) is not None for target in item.targets)
        (to_devices if is_up else to_host).append(item)
    _scatter(to_devices, reader, uploads, bytes_max=DEVICE_TIMES * WINDOW_BYTES, new_window=uploads.window)
    # The same memory for every window.
    new_window = cache(lambda bytes: np.empty(bytes, dtype=np.uint8))
    _scatter(to_host, reader, uploads, bytes_max=WINDOW_BYTES, new_window=new_window)


def _scatter(
    items: Sequence[Scatter],
    reader: BlockReader,
    uploads: Uploads,
    *,
    bytes_max: int,
    new_window: Callable[[int], U8],
) -> None:
    digesters: dict[int, Digester] = {}
    for batch in _batches(items, reader, new_window, bytes_max=bytes_max):
        for item, window, memory in batch:
            reader.add(item.number, memory.ctypes.data, begin=window.begin, bytes=window.bytes)
        reader.run()  # Verifies the blocks that are read in one piece.
        for item, window, memory in batch:
            size = reader.block(item.number).placed.spec.bytes
            if reader.verify and window.bytes < size:
                digester = digesters.setdefault(id(item), core.digester())
                digester.update(memory.ctypes.data, window.bytes)
                if window.begin + window.bytes == size:
                    reader.check(item.number, digester.end())
            window.put(memory, uploads)
        uploads.launch()


def _batches(
    items: Sequence[Scatter], reader: BlockReader, new_window: Callable[[int], U8], *, bytes_max: int
) -> Iterator[list[tuple[Scatter, Window, U8]]]:
    """Return windows of the blocks, in order, as many as fit the memory, which is asked for anew for every batch."""
    specs = [reader.block(item.number).placed.spec for item in items]
    wanted = sum(paged(spec.bytes) for spec in specs)
    memory_bytes = min(bytes_max, wanted)
    memory = np.empty(0, dtype=np.uint8)
    batch: list[tuple[Scatter, Window, U8]] = []
    used = 0
    for item, spec in zip(items, specs, strict=True):
        for window in item.windows(spec, bytes_max=bytes_max, whole=reader.verify):
            size = window.bytes
            if batch and used + size > len(memory):
                yield batch
                batch, used = [], 0
            if not batch:
                memory = new_window(memory_bytes)
            # One element, or one encoded block, may be larger than all of it.
            own = memory[used : used + size] if size <= len(memory) else np.empty(size, dtype=np.uint8)
            batch.append((item, window, own))
            used += paged(size)
    if batch:
        yield batch
