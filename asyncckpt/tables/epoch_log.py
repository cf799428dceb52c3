"""A log of numbers by epoch: ids that were removed from a table, rows that were assigned to an id.

The log is bounded. Above the bound it drops the oldest epochs, and then cannot answer for cuts before them.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from asyncckpt.native import I64

FIRST_ROOM = 1024


class EpochLog:
    """A log of int64 numbers in the order of their addition. Callers hold the table's lock.

    Epochs are ascending. Frequent calls of `add` with few numbers are cheap: all are in one array that doubles.
    """

    def __init__(self) -> None:
        # The log knows nothing of what happened up to the end of this epoch.
        self._known_from = 0
        self._reset()

    def __len__(self) -> int:
        return self._end - self._begin

    def add(self, numbers: I64, *, epoch: int, count_max: int) -> None:
        """Log numbers of an epoch, then drop oldest epochs until at most count_max numbers are left."""
        if not numbers.size:
            return
        if numbers.size > count_max:
            self.forget_all(epoch=epoch)
            return
        self._make_room(numbers.size)
        if not self._epochs or self._epochs[-1] != epoch:
            self._epochs.append(epoch)
            self._begins.append(self._end)
        self._numbers[self._end : self._end + numbers.size] = numbers
        self._end += numbers.size
        self._drop_oldest(count_max)

    def since(self, epoch: int) -> I64 | None:
        """Return the distinct numbers logged after the end of an epoch, ascending; None if unknown."""
        if epoch < self._known_from:
            return None
        later = bisect_right(self._epochs, epoch)
        begin = self._begins[later] if later < len(self._begins) else self._end
        found = self._numbers[begin : self._end]
        return np.unique(found) if len(found) else found.copy()

    def forget_all(self, *, epoch: int) -> None:
        """Drop everything; the log is complete again from the end of `epoch` on."""
        self._known_from = epoch
        self._reset()

    def _reset(self) -> None:
        self._numbers: I64 = np.empty(FIRST_ROOM, dtype=np.int64)
        self._begin = self._end = 0
        # Epoch i of the log begins at index begins[i] of the array.
        self._epochs: list[int] = []
        self._begins: list[int] = []

    def _make_room(self, more: int) -> None:
        if self._end + more <= len(self._numbers):
            return
        held = self._numbers[self._begin : self._end]
        # Not zeroed: pages that no number has reached cost nothing.
        self._numbers = np.empty(max(FIRST_ROOM, 2 * (held.size + more)), dtype=np.int64)
        self._numbers[: held.size] = held
        self._begins = [begin - self._begin for begin in self._begins]
        self._begin, self._end = 0, held.size

    def _drop_oldest(self, count_max: int) -> None:
        if len(self) <= count_max:
            return
        # Keep the epochs that begin within the last count_max numbers.
        kept = bisect_right(self._begins, self._end - count_max - 1)
        self._known_from = self._epochs[kept - 1]
        self._begin = self._begins[kept] if kept < len(self._begins) else self._end
        del self._epochs[:kept]
        del self._begins[:kept]
