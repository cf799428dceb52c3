"""Memory that nothing but the step of an optimizer shall change before it is copied: how often it was written."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle
from operator import is_

import torch

from asyncckpt.errors import UsageError
from asyncckpt.model.table import WatchedCut
from asyncckpt.native import I64

COUNT_S_MAX = 1.0
"""How long a table takes at most to count a write of its own."""

_HINT = "call future.wait_staged() before you change it, or leave its optimizer out of DeviceOptions(optimizers=...)"


class Watch:
    """Memory of a state: where it is, and how often it was written, at the call and now.

    counts: returns how often each tensor over it was written, once or several times over.
    """

    what = "tensor"

    def __init__(
        self, storages: Sequence[torch.UntypedStorage], counts: Callable[[], list[int]], name: Callable[[int], str]
    ) -> None:
        self._counts, self._name = counts, name
        self._before = counts()
        self._storages = storages
        self._begins = list(map(torch.UntypedStorage.data_ptr, self._storages))
        self._bytes = list(map(torch.UntypedStorage.nbytes, self._storages))

    @staticmethod
    def of_tensors(
        held: Sequence[torch.Tensor],
        storages: Sequence[torch.UntypedStorage],
        stepped: Sequence[torch.Tensor],
        name: Callable[[int], str],
    ) -> Watch:
        """Watch tensors of a state and, over the same memory, those of an optimizer, once or several times over.

        storages: their memory, as it was when they were looked at. RuntimeError for an inference tensor, whose writes
        torch does not count, and for a DTensor in inference mode.
        """
        is_same = all(map(is_, stepped, cycle(held)))
        counted = held if is_same else (*held, *stepped)
        # What shares the counter, for the tensor itself may be swapped with another one (torch.utils.swap_tensors).
        with torch._C.DisableTorchFunctionSubclass():
            counted = list(map(torch.Tensor.detach, counted))
        return Watch(storages, partial(_versions, counted), name)

    def begin(self) -> None:
        """Begin to watch, before the memory may change."""

    def end(self) -> None:
        """Watch no longer. Idempotent."""

    def await_counts(self) -> None:
        """Wait while the table's own writes still count as those of others."""

    def check_unchanged(self) -> None:
        now = self._counts()
        if now != self._before:
            number = next(number for number, count in enumerate(now) if count != self._before[number])
            raise UsageError(
                f"{self._named(number)} was changed between save_async and the next optimizer.step(), while it was "
                "still being copied",
                hint=_HINT,
            )

    def check_in_place(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            storage = self._storages[number]
            if storage.data_ptr() != self._begins[number] or storage.nbytes() < self._bytes[number]:
                raise UsageError(f"the memory of {self._named(number)} was freed or moved before its copy", hint=_HINT)

    def _named(self, number: int) -> str:
        return f"{self.what} {self._name(number % len(self._storages))!r}"


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


class TableWatch(Watch):
    """Columns of a table that asks before it writes to them: a RowWatcher.

    let_write: called before their rows change or move.
    """

    what = "column"

    def __init__(
        self, table: str, cut: WatchedCut, columns: Mapping[str, torch.Tensor], let_write: Callable[[], None]
    ) -> None:
        names = tuple(columns)
        super().__init__(
            list(map(torch.Tensor.untyped_storage, columns.values())),
            partial(cut.writes_by_others, names),
            lambda number: f"{table}.{names[number]}",
        )
        self._cut, self._names, self._let_write = cut, frozenset(names), let_write

    def begin(self) -> None:
        self._cut.watch(self)

    def end(self) -> None:
        self._cut.unwatch(self)

    def await_counts(self) -> None:
        until = time.monotonic() + COUNT_S_MAX
        while self._counts() != self._before and time.monotonic() < until:
            time.sleep(0.001)

    def rows_change(self, rows: I64, columns: Collection[str] | None) -> None:
        if columns is None or not self._names.isdisjoint(columns):
            self._let_write()

    def storage_moves(self) -> None:
        self._let_write()
