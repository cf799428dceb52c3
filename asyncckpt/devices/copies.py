"""The kinds of copies that a save queues on a device, directly to the host or through scratch memory of the device.

A copy through scratch memory has two halves: one within the device, after which the source may change, and one to the
host, which runs beside training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.devices.batch import Batch
from asyncckpt.devices.contract import LARGE_BYTES, PACK_BYTES, ComparesRows
from asyncckpt.devices.slots import SLOT_BYTES, runs_of, slots_of
from asyncckpt.native import I64, U64, core

FINGERPRINT_BYTES = 8
LONG_BYTES, LONG_MAX = 4 << 20, 100

Work = Callable[[Batch], None]
"""Queues copies while the side stream of the batch is current."""


class Copy(Protocol):
    """Copies from one device to host memory."""

    @property
    def bytes(self) -> int: ...
    @property
    def targets(self) -> tuple[int, int]:
        """Return the address range [begin, end) of all targets; (0, 0) without any."""
        ...

    def run(self, batch: Batch) -> None:
        """Queue the copy directly to its targets; a Work."""
        ...

    def split(self, bytes_max: int) -> tuple[Copy | None, Copy | None]:
        """Split the copy into (a direct part, a part that needs at most bytes_max of scratch memory)."""
        ...

    def by_scratch(self) -> tuple[int, Callable[[int], tuple[Work, Work]]]:
        """Return how much scratch memory the copy takes and, for memory at an address, its two halves."""
        ...


class SegmentCopy:
    """Segments (source, target, bytes), uint64 [n, 3], that do not overlap."""

    def __init__(self, segments: U64) -> None:
        self._segments = segments[np.argsort(segments[:, 1], kind="stable")]

    @property
    def bytes(self) -> int:
        return int(self._segments[:, 2].sum())

    @property
    def targets(self) -> tuple[int, int]:
        if not len(self._segments):
            return 0, 0
        return int(self._segments[0, 1]), int(self._segments[-1, 1] + self._segments[-1, 2])

    def run(self, batch: Batch) -> None:
        begin, end = self.targets
        if batch.is_reachable(begin, end - begin):
            batch.kernels.copy(self._segments, batch)
            return
        is_small = self._segments[:, 2] < LARGE_BYTES
        if not is_small.all():
            batch.kernels.transfer(np.ascontiguousarray(self._segments[~is_small]), batch, to_host=True)
        if is_small.any():
            self._pack(np.ascontiguousarray(self._segments[is_small]), batch)

    def _pack(self, small: U64, batch: Batch) -> None:
        """Copy small segments to memory that kernels cannot write: pack them on the device, then copy long pieces."""
        parts = np.cumsum(small[:, 2].astype(np.int64) + 2 * SLOT_BYTES) // PACK_BYTES
        packs = [SegmentCopy(part).by_scratch() for part in np.split(small, np.flatnonzero(np.diff(parts)) + 1)]
        try:
            address = batch.device_memory(max(bytes for bytes, _ in packs))
        except MemoryError:  # Slower: one by one.
            batch.kernels.transfer(small, batch, to_host=True)
            return
        for _, halves in packs:  # One after another in the same memory, in stream order.
            for work in halves(address):
                work(batch)

    def split(self, bytes_max: int) -> tuple[Copy | None, Copy | None]:
        # Every slot may begin up to one unit after the end of the previous one.
        taken = np.cumsum(self._segments[::-1, 2].astype(np.int64) + 2 * SLOT_BYTES)
        first = len(taken) - int(np.searchsorted(taken, bytes_max, side="right"))
        direct, scratch = self._segments[:first], self._segments[first:]
        return (SegmentCopy(direct) if len(direct) else None), (SegmentCopy(scratch) if len(scratch) else None)

    def by_scratch(self) -> tuple[int, Callable[[int], tuple[Work, Work]]]:
        segments = self._segments.view(np.int64)
        alone = self._are_long()
        begins, ends, of = runs_of(segments[:, 1], segments[:, 2], alone=alone)
        aligned_like = begins.copy()
        aligned_like[of[alone]] = segments[alone, 0]
        slots, scratch_bytes = slots_of(ends - begins, aligned_like)

        def halves(address: int) -> tuple[Work, Work]:
            inward = self._segments.copy()
            inward.view(np.int64)[:, 1] += (slots + address - begins)[of]
            outward = np.stack([slots + address, begins, ends - begins], axis=1).view(np.uint64)
            return (lambda batch: batch.kernels.copy(inward, batch)), _outward(outward)

        return scratch_bytes, halves

    def _are_long(self) -> NDArray[np.bool_]:
        """Return which segments get a slot aligned like their source, bool [n]: a copy within the device writes whole
        lines of memory then. The others share one with their neighbours. Each slot is one copy to the host.
        """
        sizes = self._segments[:, 2]
        are_long: NDArray[np.bool_] = sizes >= LONG_BYTES
        if np.count_nonzero(are_long) > LONG_MAX:
            are_long[np.argsort(sizes, kind="stable")[:-LONG_MAX]] = False
        return are_long


class RowCopy:
    """Row source_rows[i] of every column (source, target, row bytes) to row target_rows[i]; None: row i."""

    def __init__(self, columns: U64, source_rows: I64 | None, target_rows: I64 | None) -> None:
        self._columns = columns
        self._source_rows = source_rows
        self._target_rows = target_rows

    @property
    def _count(self) -> int:
        rows = self._target_rows if self._source_rows is None else self._source_rows
        assert rows is not None
        return len(rows)

    @property
    def bytes(self) -> int:
        return self._count * int(self._columns[:, 2].sum())

    @property
    def targets(self) -> tuple[int, int]:
        if not self.bytes:
            return 0, 0
        first, last = 0, self._count
        if self._target_rows is not None:
            first, last = int(self._target_rows.min()), int(self._target_rows.max()) + 1
        return _rows_range(self._columns, first, last)

    def run(self, batch: Batch) -> None:
        begin, end = self.targets
        if batch.is_reachable(begin, end - begin):
            batch.kernels.copy_rows(self._columns, self._source_rows, self._target_rows, batch)
        else:
            self._put_on_host(batch)

    def _put_on_host(self, batch: Batch) -> None:
        """Copy rows to memory that kernels cannot write: through other host memory, from which the host copies them."""
        sizes = self._columns[:, 2].astype(np.int64)
        rows_max = max(1, PACK_BYTES // int(sizes.sum()))
        begins, scratch_bytes = slots_of(min(rows_max, self._count) * sizes)
        slots = begins + batch.device_memory(scratch_bytes)
        rows = np.arange(self._count, dtype=np.int64)
        source_rows = rows if self._source_rows is None else self._source_rows
        target_rows = rows if self._target_rows is None else self._target_rows
        for first in range(0, self._count, rows_max):  # One after another in the same memory of the device.
            part = slice(first, first + rows_max)
            packed, landed = self._columns.copy(), self._columns.copy()
            packed[:, 1] = slots.view(np.uint64)
            landed[:, 0] = (begins + batch.new_pinned(scratch_bytes)).view(np.uint64)
            batch.kernels.copy_rows(packed, source_rows[part], None, batch)
            bytes = (sizes * len(source_rows[part])).view(np.uint64)
            whole = np.stack([packed[:, 1], landed[:, 0], bytes], axis=1)
            batch.kernels.transfer(np.ascontiguousarray(whole), batch, to_host=True)
            batch.afterwards(partial(core.copy_rows, landed, None, target_rows[part]))

    def split(self, bytes_max: int) -> tuple[Copy | None, Copy | None]:
        row_bytes = int(self._columns[:, 2].sum())
        left = bytes_max - len(self._columns) * SLOT_BYTES
        count = min(self._count, max(0, left // max(1, row_bytes)))
        first = self._count - count
        if self._source_rows is None and count and first:
            return self, None  # Source rows are counted from the beginning.
        return self._part(0, first), self._part(first, self._count)

    def _part(self, begin: int, end: int) -> Copy | None:
        if begin == end:
            return None
        source_rows = None if self._source_rows is None else self._source_rows[begin:end]
        targets = np.arange(self._count, dtype=np.int64) if self._target_rows is None else self._target_rows
        return RowCopy(self._columns, source_rows, targets[begin:end])

    def by_scratch(self) -> tuple[int, Callable[[int], tuple[Work, Work]]]:
        sizes = self._columns[:, 2].astype(np.int64)
        begins, scratch_bytes = slots_of(self._count * sizes)

        def halves(address: int) -> tuple[Work, Work]:
            slots = (begins + address).view(np.uint64)
            rows = np.arange(self._count, dtype=np.int64)
            inward, outward = self._columns.copy(), self._columns.copy()
            inward[:, 1] = slots
            outward[:, 0] = slots
            first = RowCopy(inward, rows if self._source_rows is None else self._source_rows, None)
            if self._target_rows is None:
                outward[:, 2] = (sizes * self._count).view(np.uint64)
                return first.run, _outward(outward)
            return first.run, RowCopy(outward, rows, self._target_rows).run

        return scratch_bytes, halves


class TensorCopy:
    """Copies a device tensor that is not plain memory (strided, conjugated, negated) to a plain host tensor."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._target, self._source = target, source

    @property
    def bytes(self) -> int:
        return self._target.nbytes

    @property
    def targets(self) -> tuple[int, int]:
        begin = self._target.data_ptr()
        return begin, begin + self._target.nbytes

    def run(self, batch: Batch) -> None:
        batch.keep(self._target, self._source)
        try:
            # torch would conjugate and negate on the host at once, before the values have arrived.
            values = self._source.resolve_conj().resolve_neg().contiguous()
        except torch.cuda.OutOfMemoryError:
            if self.bytes <= LARGE_BYTES:
                raise
            for part in self._parts():
                part.run(batch)
            return
        # The memory of the values is used again behind the copy: both are of the side stream.
        batch.kernels.transfer(_segment(values.data_ptr(), self._target.data_ptr(), self.bytes), batch, to_host=True)

    def _parts(self) -> Iterator[TensorCopy]:
        """Yield parts of the copy, of at most LARGE_BYTES where one index of a dimension has not more."""
        dimension = next(number for number, size in enumerate(self._target.shape) if size > 1)
        size = self._target.shape[dimension]
        step = max(1, size * LARGE_BYTES // self.bytes)
        for first in range(0, size, step):
            count = min(step, size - first)
            yield TensorCopy(*(side.narrow(dimension, first, count) for side in (self._target, self._source)))

    def split(self, bytes_max: int) -> tuple[Copy | None, Copy | None]:
        return (None, self) if self.bytes + SLOT_BYTES <= bytes_max else (self, None)

    def by_scratch(self) -> tuple[int, Callable[[int], tuple[Work, Work]]]:
        size = self.bytes

        def halves(address: int) -> tuple[Work, Work]:
            def inward(batch: Batch) -> None:
                memory = batch.runtime.view(address, size, batch.device)
                slot = memory.view(self._target.dtype).view(self._target.shape)
                batch.keep(self._source)
                slot.copy_(self._source, non_blocking=True)

            return inward, _outward(_segment(address, self._target.data_ptr(), size))

        return -(-size // SLOT_BYTES) * SLOT_BYTES, halves


class DeviceFingerprints:
    """The fingerprints of all rows of some columns in one snapshot: uint64 [rows_count] on a device.

    They stay there as long as the arena that holds the snapshot; `memory` is set when its copies are launched.
    """

    def __init__(self, columns: tuple[str, ...], rows_count: int) -> None:
        self.columns = columns
        self.rows_count = rows_count
        self.memory: torch.Tensor | None = None

    def fits(self, earlier: object) -> bool:
        """Return whether earlier fingerprints have the same columns and as many rows."""
        if not isinstance(earlier, DeviceFingerprints):
            return False
        return (earlier.columns, earlier.rows_count) == (self.columns, self.rows_count)


class ChangedRowsCopy:
    """Copies the rows that differ from the fingerprints `before`, or all; writes new fingerprints to `now`.

    For tables without marks: reading all rows on the device takes a fraction of the time of sending them to the host.
    columns: (source, target, row bytes), uint64 [n, 3], on one device; row i goes to row i.
    """

    def __init__(self, columns: U64, *, before: DeviceFingerprints | None, now: DeviceFingerprints) -> None:
        self._columns = columns
        self._before = before
        self._now = now

    @property
    def bytes(self) -> int:
        return self._now.rows_count * int(self._columns[:, 2].sum())

    @property
    def targets(self) -> tuple[int, int]:
        return _rows_range(self._columns, 0, self._now.rows_count) if self.bytes else (0, 0)

    @property
    def _whole(self) -> U64:
        whole: U64 = self._columns.copy()
        whole[:, 2] *= np.uint64(self._now.rows_count)
        return whole

    def run(self, batch: Batch) -> None:
        kernels, count = batch.kernels, self._now.rows_count
        assert isinstance(kernels, ComparesRows)
        try:
            now = batch.runtime.new_memory(batch.device, count * FINGERPRINT_BYTES)
        except MemoryError:  # The next save compares with nothing.
            kernels.transfer(self._whole, batch, to_host=True)
            return
        kernels.fingerprint_rows(np.ascontiguousarray(self._columns[:, [0, 2]]), count, int(now.data_ptr()), batch)
        before = None if self._before is None else self._before.memory
        begin, end = self.targets
        if before is None or not batch.is_reachable(begin, end - begin):  # All are new, or out of reach.
            kernels.transfer(self._whole, batch, to_host=True)
        else:
            marks = batch.runtime.new_memory(batch.device, count)
            torch.ne(before.view(torch.int64), now.view(torch.int64), out=marks.view(torch.bool))
            kernels.copy_marked(self._columns, int(marks.data_ptr()), count, batch)
            batch.keep(before, marks)
        self._now.memory = now
        batch.keep(now)

    def split(self, bytes_max: int) -> tuple[Copy | None, Copy | None]:
        return self, None

    def by_scratch(self) -> tuple[int, Callable[[int], tuple[Work, Work]]]:
        raise AssertionError("rows are compared on their way to the host")


def _rows_range(columns: U64, first: int, last: int) -> tuple[int, int]:
    """Return the address range of rows [first, last) of the targets of columns."""
    begins, sizes = columns[:, 1].astype(np.int64), columns[:, 2].astype(np.int64)
    return int((begins + first * sizes).min()), int((begins + last * sizes).max())


def _segment(source: int, target: int, bytes: int) -> U64:
    segment: U64 = np.array([[source, target, bytes]], dtype=np.uint64)
    return segment


def _outward(segments: U64) -> Work:
    """Return the work that copies segments from scratch memory to the host, by kernels if they reach all targets."""

    def work(batch: Batch) -> None:
        if all(batch.is_reachable(target, size) for _, target, size in segments.tolist()):
            batch.kernels.copy(segments, batch)
        else:
            batch.kernels.transfer(segments, batch, to_host=True)

    return work
