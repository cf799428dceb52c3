"""Bring blocks to where they belong, by way of windows in memory.

For what cannot be read straight into place: rows that are scattered over a table, boxes of other form, blocks of which
only some is wanted; encoded blocks; strides; devices. Many small blocks share one window, and a large one takes
several; nothing is read twice. Digests are taken over all of a block, or over the leaves that hold what is wanted,
where their digests are known. An encoded block is read whole, verified, then decoded. boxes.py and scattered_rows.py
say what becomes of a window's bytes.

Windows for devices are pinned, and there are two: one is read while the other is uploaded (devices/uploads.py).
So a load takes as long as the slower of disk and bus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
    def check(self, number: int, digest: bytes, *, begin: int = 0, end: int | None = None) -> None:
        """Raise CorruptError unless the block, or a part of it that has one, has this digest."""
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
    def wanted(self, spec: BlockSpec) -> tuple[int, int]:
        """Return a range of the block's bytes that holds all that is wanted: of an encoded one, all."""
        ...

    def windows(self, spec: BlockSpec, within: tuple[int, int], *, bytes_max: int, gapless: bool) -> Iterable[Window]:
        """Return the windows of a range that holds what is wanted, ascending, of about bytes_max at most; a single
        element may be larger.

        gapless: from the range's begin to its end, for a digest; else those that hold something wanted will do. An
        encoded block is one window.
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
    for batch in _batches([_Part.of(item, reader) for item in items], new_window, bytes_max=bytes_max):
        for part, window, memory in batch:
            reader.add(part.item.number, memory.ctypes.data, begin=part.reads_from(window), bytes=len(memory))
        reader.run()  # Verifies the blocks that are read in one piece.
        for part, window, memory in batch:
            number, begin = part.item.number, part.reads_from(window)
            if reader.verify and len(memory) < reader.block(number).placed.spec.bytes:
                digester = digesters.setdefault(id(part), core.digester())
                digester.update(memory.ctypes.data, len(memory))
                if begin + len(memory) == part.end:
                    reader.check(number, digester.end(), begin=part.begin, end=part.end)
            window.put(memory[window.begin - begin :][: window.bytes], uploads)
        uploads.launch()


@dataclass(frozen=True)
class _Part:
    """Bytes [begin, end) of a block, which are read: what is wanted of it, and what a digest asks for around it.

    within: of what there are windows; the first of them is read from `begin` on, the last one up to `end`.
    """

    item: Scatter
    spec: BlockSpec
    begin: int
    end: int
    within: tuple[int, int]
    gapless: bool

    @staticmethod
    def of(item: Scatter, reader: BlockReader) -> _Part:
        facts = reader.block(item.number)
        within = item.wanted(facts.placed.spec)
        begin, end = facts.part_around(*within) if reader.verify else within
        if not facts.leaf_digests and reader.verify:
            within = begin, end
        return _Part(item, facts.placed.spec, begin, end, within, gapless=reader.verify)

    def windows(self, *, bytes_max: int) -> Iterable[Window]:
        room = bytes_max - (self.end - self.begin) + (self.within[1] - self.within[0])
        return self.item.windows(self.spec, self.within, bytes_max=max(room, bytes_max // 2), gapless=self.gapless)

    def reads_from(self, window: Window) -> int:
        return self.begin if window.begin == self.within[0] else window.begin

    def reads_to(self, window: Window) -> int:
        end = window.begin + window.bytes
        return self.end if end == self.within[1] else end


def _batches(
    parts: Sequence[_Part], new_window: Callable[[int], U8], *, bytes_max: int
) -> Iterator[list[tuple[_Part, Window, U8]]]:
    """Return windows of the blocks, in order, as many as fit the memory, which is asked for anew for every batch."""
    memory_bytes = min(bytes_max, sum(paged(part.end - part.begin) for part in parts))
    memory = np.empty(0, dtype=np.uint8)
    batch: list[tuple[_Part, Window, U8]] = []
    used = 0
    for part in parts:
        for window in part.windows(bytes_max=bytes_max):
            size = part.reads_to(window) - part.reads_from(window)
            if batch and used + size > len(memory):
                yield batch
                batch, used = [], 0
            if not batch:
                memory = new_window(memory_bytes)
            # One element, or one encoded block, may be larger than all of it.
            own = memory[used : used + size] if size <= len(memory) else np.empty(size, dtype=np.uint8)
            batch.append((part, window, own))
            used += paged(size)
    if batch:
        yield batch
