"""The memory that only steps of optimizers change: parameters, what optimizers keep for them, and rows of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.native import I64, U64

# Of these by far the most are, so they are asked nothing more.
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_bytes_of = attrgetter("nbytes")
Places = tuple[U64, I64, I64]


@dataclass
class _Known:
    """Where the memory of an optimizer was, and, once a step has asked, whose it is."""

    begins: U64
    spans: I64
    owners: frozenset[int] | None = None


class SteppedMemory:
    """The memory of tensors that only steps of some optimizers change, as it is when somebody asks for it first.

    bytes_min: shorter tensors are left out. tensors: in the order of
    their addresses; counted: what the optimizers have, which counts writes that a tensor within it does not (DTensor).
    owners: int64 [n], the number of the optimizer of each.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer] = (), *, bytes_min: int = 0) -> None:
        self._optimizers = tuple(optimizers)
        self._numbers = {id(item): number for number, item in enumerate(self._optimizers)}
        self._bytes_min = bytes_min
        self._is_read = not optimizers
        self._begins, self._bytes = np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
        self.tensors: list[torch.Tensor] = []
        self.counted: list[torch.Tensor] = []
        self.owners: I64 = np.empty(0, dtype=np.int64)
        # An optimizer of tables has a parameter for each, which names it.
        self._tables = {id(table): number for number, item in enumerate(optimizers) for table in _tables_of(item)}
        self._known: list[_Known] = []

    def _read(self) -> None:
        """Look where the memory is."""
        self._is_read = True
        found = [_tensors_of(item) for item in self._optimizers]
        tensors, counted = ([tensor for own in found for tensor in own[part]] for part in (0, 1))
        owners = np.repeat(np.arange(len(found)), [len(own[0]) for own in found])
        read = [places_of(own[0]) for own in found]
        begins = np.concatenate([own[0] for own in read])
        bytes, spans = (np.concatenate([own[part] for own in read]) for part in (1, 2))
        order = np.lexsort((bytes, begins))
        order = order[bytes[order] >= self._bytes_min]
        self._begins, self._bytes = begins[order], bytes[order]
        # Of those that begin at one address the longest is the last: by it `find` knows them.
        self._is_longest = np.append(self._begins[1:] != self._begins[:-1], True)[: len(order)]
        # No earlier one reaches further.
        self._reaches = np.maximum.accumulate(self._begins + spans[order].astype(np.uint64))
        self.tensors = [tensors[number] for number in order.tolist()]
        self.counted = [counted[number] for number in order.tolist()]
        self.owners = owners[order]
        self._known = [_Known(own[0], own[2]) for own in read]

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

        Without an earlier `find` for it, only the tables count.
        """
        owners: frozenset[int] = frozenset()
        if self._known:
            # Where it is now: parameters may have got other memory, also another one's.
            number = self._numbers.get(id(optimizer))
            tensors = _tensors_of(optimizer)[0]
            begins, _, spans = places_of(tensors)
            known = None if number is None else self._known[number]
            if known is None or not all(map(np.array_equal, (begins, spans), (known.begins, known.spans))):
                known = _Known(begins, spans)
            if known.owners is None:
                known.owners = self._owners_of(begins, spans)
            owners = known.owners
            if number is not None:  # Its own, too: what it has left is still to be compared with what it was.
                owners |= {number}
        if not self._tables:
            return owners
        return owners.union(self._tables[id(table)] for table in _tables_of(optimizer) if id(table) in self._tables)

    def _owners_of(self, begins: U64, spans: I64) -> frozenset[int]:
        """Return the owners of tensors that memory ranges reach into, perhaps also of some that lie in longer ones."""
        is_memory = _are_memory(begins, spans)
        begins, ends = begins[is_memory], begins[is_memory] + spans[is_memory].astype(np.uint64)
        count = len(self._begins) + 1
        firsts = np.bincount(np.searchsorted(self._reaches, begins, side="right"), minlength=count)
        lasts = np.bincount(np.searchsorted(self._begins, ends, side="left"), minlength=count)
        is_reached = np.cumsum(firsts - lasts)[:-1] > 0
        return frozenset(np.flatnonzero(np.bincount(self.owners[is_reached & self._is_longest])).tolist())


def _are_memory(begins: U64, bytes: I64) -> NDArray[np.bool_]:
    """Return which ranges are memory, bool [n]: what torch has freed or never made has no address."""
    are: NDArray[np.bool_] = (begins > 0) & (bytes > 0)
    return are


def _tables_of(optimizer: torch.optim.Optimizer) -> list[object]:
    return [
        parameter.table
        for group in optimizer.param_groups
        if group["params"] and type(group["params"][0]) not in _PLAIN
        for parameter in group["params"]
        if hasattr(parameter, "table")
    ]


def _tensors_of(optimizer: torch.optim.Optimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an optimizer writes, and what it has of each: a DTensor has one within."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = optimizer.state if isinstance(optimizer.state, Mapping) else {}
    kept = [own for own in map(state.get, parameters) if own is not None]
    values = [value for own in kept for value in (own.values() if isinstance(own, Mapping) else (own,))]
    found = parameters + values
    if not _PLAIN.issuperset(map(type, found)):
        found = [value for value in found if isinstance(value, torch.Tensor)]
        return [value if type(value) in _PLAIN else getattr(value, "_local_tensor", value) for value in found], found
    return found, found


def places_of(tensors: Sequence[torch.Tensor]) -> Places:
    """Return the address of every tensor, its bytes, and from its first to past its last one; 0 where it has no
    address (sparse ones, fakes, what was not made yet).

    No tuple for each: thousands of these alive at once would start a full garbage collection.
    """
    count = len(tensors)
    try:
        begins = np.fromiter(map(torch.Tensor.data_ptr, tensors), dtype=np.uint64, count=count)
        bytes = np.fromiter(map(_bytes_of, tensors), dtype=np.int64, count=count)
        are_dense = np.fromiter(map(torch.Tensor.is_contiguous, tensors), dtype=np.bool_, count=count)
    except Exception:  # Tensors of other classes raise what they like.
        if count == 1:
            return np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        found = [places_of([tensor]) for tensor in tensors]
        begins = np.concatenate([own[0] for own in found])
        bytes, spans = (np.concatenate([own[part] for own in found]) for part in (1, 2))
        return begins, bytes, spans
    spans = bytes.copy()
    for number in np.flatnonzero(~are_dense & (bytes > 0)).tolist():
        one = tensors[number]
        last = sum((size - 1) * step for size, step in zip(one.shape, one.stride(), strict=True))
        spans[number] = (last + 1) * one.itemsize
    return begins, bytes, spans


# Nothing: shared by all saves, for making it costs a tenth of a millisecond.
NOTHING_STEPPED: Final = SteppedMemory()
