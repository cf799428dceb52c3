"""Rows that differ from those of an earlier snapshot, found by a print of each on the device.

For tables that nobody marks: reading all rows on the device takes a fraction of the time that sending them to the host
does. The prints of a snapshot stay on the device, 8 bytes a row, as long as the arena that holds it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from asyncckpt.devices.batch import Batch
from asyncckpt.devices.contract import ComparesRows
from asyncckpt.devices.copies import Copy, Work
from asyncckpt.native import U64

PRINT_BYTES = 8


class PrintsOnDevice:
    """The prints of all rows of some columns in one snapshot: uint64 [rows_count] on a device, when its copies are
    launched.
    """

    def __init__(self, columns: tuple[str, ...], rows_count: int) -> None:
        self.columns = columns
        self.rows_count = rows_count
        self.memory: torch.Tensor | None = None

    def fits(self, earlier: object) -> bool:
        """Whether earlier prints are of the same columns and as many rows."""
        if not isinstance(earlier, PrintsOnDevice):
            return False
        return (earlier.columns, earlier.rows_count) == (self.columns, self.rows_count)


class PrintedCopy:
    """Columns of a table, whole: the rows that differ from `before`, or all of them; and their prints to `now`.

    columns: (source, target, row bytes), uint64 [n, 3], on one device; row i goes to row i. Implements copies.Copy.
    """

    def __init__(self, columns: U64, *, before: PrintsOnDevice | None, now: PrintsOnDevice) -> None:
        self._columns = columns
        self._before = before
        self._now = now

    @property
    def bytes(self) -> int:
        return self._now.rows_count * int(self._columns[:, 2].sum())

    @property
    def targets(self) -> tuple[int, int]:
        if not self.bytes:
            return 0, 0
        begins, sizes = self._columns[:, 1].astype(np.int64), self._columns[:, 2].astype(np.int64)
        return int(begins.min()), int((begins + self._now.rows_count * sizes).max())

    def run(self, batch: Batch) -> None:
        kernels, count = batch.kernels, self._now.rows_count
        assert isinstance(kernels, ComparesRows)
        now = batch.runtime.new_memory(batch.device, count * PRINT_BYTES)
        kernels.print_rows(np.ascontiguousarray(self._columns[:, [0, 2]]), count, int(now.data_ptr()), batch)
        before = None if self._before is None else self._before.memory
        begin, end = self.targets
        if before is None or not batch.is_reachable(begin, end - begin):  # All rows are new, or cannot be put singly.
            whole = self._columns.copy()
            whole[:, 2] *= np.uint64(count)
            kernels.transfer(whole, batch, to_host=True)
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
