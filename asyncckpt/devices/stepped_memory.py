"""The memory that only steps of optimizers change: parameters, what optimizers keep for them, and rows of tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.native import I64, U64
from asyncckpt.native.torch_calls import KnownTensors

# Of these by far the most are, so they are asked nothing more.
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_bytes_of = attrgetter("nbytes")


class KeptPlaces:
    """Reads where tensors are: by the core, while they have the facts that they had before (native/torch_calls.py)."""

    def __init__(self) -> None:
        self._known: KnownTensors | None = None
        self._bytes = np.empty(0, dtype=np.int64)
        self._in_vain = 0

    def of(self, tensors: Sequence[torch.Tensor]) -> tuple[U64, I64]:
        """Return the address and the bytes of every tensor, as `places_of`."""
        places = None if self._known is None else self._known.places(tensors)
        if places is not None:
            self._in_vain = 0
            return places["address"], self._bytes
        begins, self._bytes = places_of(tensors)
        self._in_vain += 1
        # To learn their facts takes longer than to read them once: seldom, where that was in vain.
        is_due = not self._in_vain & (self._in_vain - 1)
        self._known = KnownTensors.of(tensors) if is_due else None
        return begins, self._bytes


class SteppedMemory:
    """The memory of tensors that only steps of some optimizers change, as it is when somebody asks for it first.

    bytes_min: shorter tensors are left out. tensors: in the order of their addresses. owners: int64 [n], the number of
    the optimizer of each.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        bytes_min: int = 0,
        places: Callable[[Sequence[torch.Tensor]], tuple[U64, I64]] | None = None,
    ) -> None:
        self._optimizers = tuple(optimizers)  # Kept, so that their ids stay theirs.
        self._bytes_min = bytes_min
        self._places = places_of if places is None else places
        self._is_read = not optimizers
        self._begins, self._bytes = np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
        self.tensors: list[torch.Tensor] = []
        self.owners: I64 = np.empty(0, dtype=np.int64)
        # An optimizer of tables has a parameter for each, which names it.
        self._tables = {id(table): number for number, item in enumerate(optimizers) for table in _tables_of(item)}
        self._known: dict[int, tuple[list[int], frozenset[int]]] = {}

    def _read(self) -> None:
        """Look where the memory is."""
        self._is_read = True
        found = [_tensors_of(item) for item in self._optimizers]
        tensors = [tensor for own in found for tensor in own]
        owners = np.repeat(np.arange(len(found)), [len(own) for own in found])
        begins, bytes = self._places(tensors)
        order = np.lexsort((bytes, begins))
        order = order[bytes[order] >= self._bytes_min]
        self._begins, self._bytes = begins[order], bytes[order]
        # Of those that begin at one address the longest is the last: by it `find` knows them.
        self._is_longest = np.append(self._begins[1:] != self._begins[:-1], True)[: len(order)]
        # No earlier one reaches further.
        self._reaches = np.maximum.accumulate(self._begins + self._bytes.astype(np.uint64))
        self.tensors = [tensors[number] for number in order.tolist()]
        self.owners = owners[order]
        self._known = {
            id(item): (_parameters_of(item), self._owners_of(begins[owners == number], bytes[owners == number]))
            for number, item in enumerate(self._optimizers)
        }

    def find(self, begins: U64, bytes: I64) -> I64:
        """Return the number of a tensor that begins where a memory range does and is not shorter; -1: there is none."""
        are_long = _are_memory(begins, bytes) & (bytes >= self._bytes_min)
        if not self._is_read and are_long.any():
            self._read()
        if not len(self.tensors):
            return np.full(len(begins), -1, dtype=np.int64)
        found = np.maximum(np.searchsorted(self._begins, begins, side="right") - 1, 0)
        is_within = (self._begins[found] == begins) & (bytes <= self._bytes[found])
        return np.where(is_within & are_long, found, -1)

    def owner_of(self, table: object) -> int | None:
        """Return the number of the optimizer that updates the rows of a table; None: there is none."""
        return self._tables.get(id(table))

    def parts_of(self, optimizer: torch.optim.Optimizer) -> frozenset[int]:
        """Return the numbers of the optimizers whose memory a step of any optimizer changes, or a piece of it.

        Of what `find` has never been asked for, only the tables count.
        """
        parameters, owners = self._known.get(id(optimizer), (None, frozenset()))
        if self._known and parameters != _parameters_of(optimizer):
            owners = self._owners_of(*places_of(_tensors_of(optimizer)))
        if not self._tables:
            return owners
        return owners.union(self._tables[id(table)] for table in _tables_of(optimizer) if id(table) in self._tables)

    def _owners_of(self, begins: U64, bytes: I64) -> frozenset[int]:
        """Return the owners of tensors that memory ranges reach into, perhaps also of some that lie in longer ones."""
        is_memory = _are_memory(begins, bytes)
        begins, ends = begins[is_memory], begins[is_memory] + bytes[is_memory].astype(np.uint64)
        count = len(self._begins) + 1
        firsts = np.bincount(np.searchsorted(self._reaches, begins, side="right"), minlength=count)
        lasts = np.bincount(np.searchsorted(self._begins, ends, side="left"), minlength=count)
        is_reached = np.cumsum(firsts - lasts)[:-1] > 0
        return frozenset(np.flatnonzero(np.bincount(self.owners[is_reached & self._is_longest])).tolist())


def _are_memory(begins: U64, bytes: I64) -> NDArray[np.bool_]:
    """Return which ranges are memory, bool [n]: what torch has freed or never made has no address."""
    are: NDArray[np.bool_] = (begins > 0) & (bytes > 0)
    return are


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return by which it is known whether an optimizer still has the parameters that it had."""
    return [number for group in optimizer.param_groups for number in map(id, group["params"])]


def _tables_of(optimizer: torch.optim.Optimizer) -> list[object]:
    return [
        parameter.table
        for group in optimizer.param_groups
        if group["params"] and type(group["params"][0]) not in _PLAIN
        for parameter in group["params"]
        if hasattr(parameter, "table")
    ]


def _tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = [own for own in map(optimizer.state.get, parameters) if own is not None]
    values = [value for own in kept for value in (own.values() if isinstance(own, Mapping) else (own,))]
    found = parameters + values
    if _PLAIN.issuperset(map(type, found)):
        return found
    return [
        # What a DTensor holds on this rank.
        value if type(value) in _PLAIN else getattr(value, "_local_tensor", value)
        for value in found
        if isinstance(value, torch.Tensor)
    ]


def places_of(tensors: Sequence[torch.Tensor]) -> tuple[U64, I64]:
    """Return the address and the bytes of every tensor; no bytes where it has no address (sparse ones, fakes).

    No tuple for each: thousands of these alive at once would start a full garbage collection.
    """
    count = len(tensors)
    try:
        begins = np.fromiter(map(torch.Tensor.data_ptr, tensors), dtype=np.uint64, count=count)
        return begins, np.fromiter(map(_bytes_of, tensors), dtype=np.int64, count=count)
    except RuntimeError:
        if count == 1:
            return np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.int64)
    found = [places_of([tensor]) for tensor in tensors]
    return np.concatenate([begins for begins, _ in found]), np.concatenate([bytes for _, bytes in found])


# Nothing: shared by all saves, for making it costs a tenth of a millisecond.
NOTHING_STEPPED: Final = SteppedMemory()
