"""Numbers by the epoch in which something happened to them: ids that a table lost, rows that were given to an id.

The log is bounded. When it would grow beyond, the oldest epochs are dropped, and what happened since a cut before them
is not known any more.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from asyncckpt.native import I64

FIRST_ROOM = 1024


class EpochLog:
    """A log of int64 numbers in the order in which they came. Callers hold the table's lock.

    Epochs are ascending. `add` may be called often with few numbers: they all lie in one array that doubles.
    """

    def __init__(self) -> None:
        # What happened up to the end of this epoch is not known.
        self._known_from = 0
        self._start_anew()

    def __len__(self) -> int:
        return self._end - self._begin

    def add(self, numbers: I64, *, epoch: int, count_max: int) -> None:
        """Log numbers of an epoch, then drop oldest epochs until at most count_max of them are left."""
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
        """Return the distinct numbers logged after the end of an epoch, ascending; None when that is not known."""
        if epoch < self._known_from:
            return None
        later = bisect_right(self._epochs, epoch)
        begin = self._begins[later] if later < len(self._begins) else self._end
        found = self._numbers[begin : self._end]
        return np.unique(found) if len(found) else found.copy()

    def forget_all(self, *, epoch: int) -> None:
        """Drop everything; what happens after the end of epoch will be known again."""
        self._known_from = epoch
        self._start_anew()

    def _start_anew(self) -> None:
        self._numbers: I64 = np.empty(FIRST_ROOM, dtype=np.int64)
        self._begin = self._end = 0
        # Epoch i of the log begins at place begins[i] of the array.
        self._epochs: list[int] = []
        self._begins: list[int] = []

    def _make_room(self, more: int) -> None:
        if self._end + more <= len(self._numbers):
            return
        held = self._numbers[self._begin : self._end]
        # Not zeroed: pages that no number has reached yet cost nothing.
        self._numbers = np.empty(max(FIRST_ROOM, 2 * (held.size + more)), dtype=np.int64)
        self._numbers[: held.size] = held
        self._begins = [begin - self._begin for begin in self._begins]
        self._begin, self._end = 0, held.size

    def _drop_oldest(self, count_max: int) -> None:
        if len(self) <= count_max:
            return
        # The first epoch that may stay is the first that begins so far behind.
        kept = bisect_right(self._begins, self._end - count_max - 1)
        self._known_from = self._epochs[kept - 1]
        self._begin = self._begins[kept] if kept < len(self._begins) else self._end
        del self._epochs[:kept]
        del self._begins[:kept]
