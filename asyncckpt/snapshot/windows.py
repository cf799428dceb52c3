"""Bring blocks to where they belong, by way of windows in memory.

For what cannot be read straight into place: rows that are scattered over a table, boxes of other form, blocks of which
only some is wanted; encoded blocks; strides; devices. Many small blocks share one window, and a large one takes
several; nothing is read twice. Digests are taken over all of a block, or over the leaves that hold what is wanted,
where their digests are known. An encoded block is read whole, verified, then decoded. `RowScatter` puts the rows of a
window in their places, boxes.py its boxes.

`uploads` is None in a process that uses no device: then all targets are on the host, or on what torch copies to.

Windows for devices are pinned, and there are two: one is read while the other is uploaded (devices/uploads.py).
So a load takes as long as the slower of disk and bus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.encodings import decode
from asyncckpt.format.manifest import BlockFacts
from asyncckpt.model.block import BlockSpec
from asyncckpt.native import core, paged
from asyncckpt.native.contract import I64, U8, Digester

if TYPE_CHECKING:
    from asyncckpt.devices.uploads import Uploads


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
    def put(self, memory: U8, uploads: Uploads | None) -> None:
        """Bring what is wanted of these bytes to its place on the host, and list what goes to devices."""
        ...


class Scatter(Protocol):
    """A block, and where parts of it go."""

    @property
    def number(self) -> int: ...
    @property
    def targets(self) -> Iterable[torch.Tensor]: ...
    def wanted(self, spec: BlockSpec) -> tuple[int, int]:
        """Return a range of the block's bytes that holds all that is wanted: all bytes of an encoded one."""
        ...

    def windows(self, spec: BlockSpec, within: tuple[int, int], *, bytes_max: int, gapless: bool) -> Iterable[Window]:
        """Return the windows of a range that holds what is wanted, ascending, of about bytes_max at most; a single
        element may be larger.

        gapless: from the range's start to its end, for a digest; else those that hold something wanted will do. An
        encoded block is one window.
        """
        ...


def scatter_all(items: Sequence[Scatter], reader: BlockReader, uploads: Uploads | None) -> None:
    """Read every block and put its parts in place; CorruptError naming a damaged one, DeviceError.

    What goes to devices is launched, but may be on its way still when this returns.
    """
    to_devices: list[Scatter] = []
    to_host: list[Scatter] = []
    for item in items:
        (to_devices if any(goes_up(target, uploads) for target in item.targets) else to_host).append(item)
    if uploads is not None:
        _scatter(to_devices, reader, uploads, bytes_max=DEVICE_TIMES * WINDOW_BYTES, new_window=uploads.window)
    # The same memory for every window.
    new_window = cache(lambda bytes: np.empty(bytes, dtype=np.uint8))
    _scatter(to_host, reader, uploads, bytes_max=WINDOW_BYTES, new_window=new_window)


def _scatter(
    items: Sequence[Scatter],
    reader: BlockReader,
    uploads: Uploads | None,
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
        if uploads is not None:
            uploads.launch()


def goes_up(target: torch.Tensor, uploads: Uploads | None) -> bool:
    """Return whether a target is on a device to which uploads copy."""
    return uploads is not None and uploads.device_of(target) is not None


def is_on_host(target: torch.Tensor, uploads: Uploads | None) -> bool:
    """Return whether the host writes a target's memory directly."""
    return target.is_cpu and not goes_up(target, uploads)


def put(target: torch.Tensor, values: torch.Tensor, uploads: Uploads | None) -> None:
    """Copy values on the CPU to any tensor of their shape, to one on a device with the launch; see Uploads.put."""
    if uploads is None:
        target.copy_(values)
    else:
        uploads.put(target, values)


@dataclass(frozen=True)
class _Part:
    """Bytes [begin, end) of a block, which are read: what is wanted of it, and what a digest asks for around it.

    within: what the windows cover; the first of them is read from `begin` on, the last one up to `end`.
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
    """Return windows of the blocks, in order, as many as fit the memory, which is asked for again for every batch."""
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


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowScatter:
    """A block of a column and where its rows go.

    target: `[..., *row shape]`, to whose dtype values are converted. rows: the target's row for every wanted row, int64
    [n], CPU. mine: positions of the wanted rows in the block, ascending int64 [n]; None: all.
    """

    number: int
    target: torch.Tensor
    rows: torch.Tensor
    mine: I64 | None

    @property
    def targets(self) -> tuple[torch.Tensor, ...]:
        return (self.target,)

    def wanted(self, spec: BlockSpec) -> tuple[int, int]:
        if spec.encoding or self.mine is None or not len(self.mine):
            return 0, spec.bytes
        row_bytes = spec.bytes // max(1, spec.shape[0])
        return int(self.mine[0]) * row_bytes, (int(self.mine[-1]) + 1) * row_bytes

    def windows(self, spec: BlockSpec, within: tuple[int, int], *, bytes_max: int, gapless: bool) -> Iterator[_Rows]:
        """Return ranges of rows."""
        count = spec.shape[0]
        if spec.encoding:
            yield _Rows(begin=0, bytes=spec.bytes, scatter=self, spec=spec, first_row=0, end_row=count)
            return
        row_bytes = spec.bytes // max(1, count)
        step = max(1, bytes_max // max(1, row_bytes))
        low, high = (at // row_bytes for at in within) if row_bytes else (0, count)
        for begin in range(low, high, step):
            end = min(begin + step, high)
            if gapless or self._wants(begin, end):
                size = (end - begin) * row_bytes
                yield _Rows(begin * row_bytes, size, scatter=self, spec=spec, first_row=begin, end_row=end)

    def _wants(self, begin: int, end: int) -> bool:
        if self.mine is None:
            return True
        low, high = np.searchsorted(self.mine, [begin, end])
        return bool(low < high)


@dataclass(frozen=True)
class _Rows:
    """Rows [first_row, end_row) of a block."""

    begin: int
    bytes: int
    scatter: RowScatter
    spec: BlockSpec
    first_row: int
    end_row: int

    def put(self, memory: U8, uploads: Uploads | None) -> None:
        item = self.scatter
        if item.mine is None:
            positions, rows = None, item.rows[self.first_row : self.end_row]
        else:
            low, high = (int(at) for at in np.searchsorted(item.mine, [self.first_row, self.end_row]))
            positions, rows = item.mine[low:high] - self.first_row, item.rows[low:high]
        if not len(rows):
            return
        values = self._values(memory).to(item.target.dtype)
        if values.shape[1:] != item.target.shape[1:]:
            values, positions = self._resized(values, rows, positions), None
        if uploads is not None and uploads.device_of(item.target) is not None:
            uploads.put_rows(item.target, np.ascontiguousarray(rows.numpy()), values.contiguous(), positions)
            return
        if item.target.is_cpu and item.target.is_contiguous():
            row_bytes = item.target[:1].nbytes
            columns = np.array([[values.data_ptr(), item.target.data_ptr(), row_bytes]], dtype=np.uint64)
            core.copy_rows(columns, positions, np.ascontiguousarray(rows.numpy()))
            return
        if positions is not None:
            values = values[torch.from_numpy(positions)]
        item.target[rows.to(item.target.device)] = values.to(item.target.device)

    def _resized(self, values: torch.Tensor, rows: torch.Tensor, positions: I64 | None) -> torch.Tensor:
        """Return rows of the target with what both shapes have of the values: see TableLoadPlan.resized."""
        from asyncckpt.devices.fetch import to_host  # Few loads need it.

        found = to_host(self.scatter.target[rows.to(self.scatter.target.device)])
        both = (slice(None), *map(slice, map(min, values.shape[1:], found.shape[1:])))
        found[both] = (values if positions is None else values[torch.from_numpy(positions)])[both]
        return found

    def _values(self, memory: U8) -> torch.Tensor:
        """Return the rows as the array they are, contiguous on the CPU; they may share the window's memory."""
        if self.spec.encoding:
            return decode(memory, self.spec)
        dtype = dtype_by_name(self.spec.dtype, owner=self.spec.name).dtype
        return torch.from_numpy(memory).view(dtype).reshape(self.end_row - self.first_row, *self.spec.shape[1:])
