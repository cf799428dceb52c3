"""The facts of leaves: everything that the image depends on, and everything that makes a raw copy safe.

Type, shape, dtype, device, whether it is dense or a view that stands for other values; for anything but plain memory
also strides, layout and conjugation. They are read by torch's own calls, some tensors at a time: then what one call has
brought into the processor's caches is there for the next ones, and few tuples live at once, thousands of which would
start a full garbage collection.

Tensors may change at any moment, on other threads and in signal handlers. So their storages are read, and held, before
the facts, and their addresses after these: an address within a storage that is held is that of memory which stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from asyncckpt.errors import UsageError
from asyncckpt.native import I64, U64
from asyncckpt.plan.leaf_memory import ALIGNMENT, check_leaf, is_transformed, span_bytes
from asyncckpt.plan.module_state import PLAIN_TENSORS
from asyncckpt.plan.state import FlatState

_AT_A_TIME = 256
_COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))
_dtype, _device = attrgetter("dtype"), attrgetter("device")
# What is raised for what is no tensor, or one of a kind that has no sizes, strides or memory.
_NOT_THERE = (AttributeError, RuntimeError, TypeError, ValueError)
_size, _is_dense, _is_neg = torch.Tensor.size, torch.Tensor.is_contiguous, torch.Tensor.is_neg


@dataclass(frozen=True)
class Places:
    """Where tensors are, and their storages, which are held: their first bytes and how many they have.

    addresses: of first elements; 0 of a tensor that has none.
    """

    storages: list[torch.UntypedStorage]
    begins: U64
    bytes: I64
    addresses: U64


class LeafFacts:
    """Facts of tensors. Holds no tensor.

    A parameter, a buffer and a tensor are of one type here: what is stored of them is the same.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Read the facts of tensors that passed check_leaf, and that nobody changes meanwhile."""
        self._count = len(tensors)
        self._facts = list(map(_facts, _parts(tensors)))

    def places(self, tensors: Sequence[torch.Tensor]) -> Places | None:
        """Return where tensors are that have these facts; None: one has others."""
        try:
            return _places(tensors, self._facts) if len(tensors) == self._count else None
        except _NOT_THERE:
            return None

    def difference(self, tensors: Sequence[torch.Tensor], name: Callable[[int], str]) -> UsageError:
        """Return the error for tensors that do not have these facts any more, or had others for a moment."""
        number = next((number for number in range(len(tensors)) if not self._holds(number, tensors[number])), None)
        if number is None:
            for number, tensor in enumerate(tensors):
                check_leaf(tensor, name(number))
                if tensor.numel() and not _address(tensor):
                    return without_memory(name(number))
            return changed("tensors of the state have become others, and then the same again,")
        sizes, dtypes, are_dense, *_ = self._facts[number // _AT_A_TIME]
        at = number % _AT_A_TIME
        expected = f"{dtypes[at]} {tuple(sizes[at])}, {'dense' if are_dense[at] else 'strided'}"
        what = f"tensor {name(number)!r} has become another one"
        return changed(what, found=_described(tensors[number]), expected=expected)

    def _holds(self, number: int, tensor: torch.Tensor) -> bool:
        known, at = self._facts[number // _AT_A_TIME], number % _AT_A_TIME
        try:
            own = _facts([tensor])
        except _NOT_THERE:
            return False
        *_, others = known
        return own == (*([fact[at]] for fact in known[:-1]), {0: others[at]} if at in others else {})


def changed(what: str, **facts: str) -> UsageError:
    """Return the error for what was changed while a save waited."""
    return UsageError(
        f"{what} while the call of a save waited",
        **facts,
        hint="let no signal handler and no other thread change their dtype, shape, device or memory meanwhile",
    )


def without_memory(name: str) -> UsageError:
    return UsageError(f"tensor {name!r} has no memory", hint="it stands for values that torch has not made")


def read_places(tensors: Sequence[torch.Tensor]) -> Places:
    """Return where tensors are, whatever they are like. RuntimeError for one that has no storage."""
    places = _places(tensors, None)
    assert places is not None
    return places


def addresses_of(tensors: Sequence[torch.Tensor]) -> U64:
    """Return the addresses of tensors; 0 of one that has none."""
    return np.array(_addresses(tensors), dtype=np.uint64)


def _parts(tensors: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
    return (tensors[begin : begin + _AT_A_TIME] for begin in range(0, len(tensors), _AT_A_TIME))


def _facts(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return the facts of some tensors: a list for each, and by their numbers others of those that are not plain."""
    types = list(map(type, tensors))
    if PLAIN_TENSORS.issuperset(types):
        types = [torch.Tensor] * len(types)
    else:
        types = [torch.Tensor if kind in PLAIN_TENSORS else kind for kind in types]
    dtypes, are_dense = list(map(_dtype, tensors)), list(map(_is_dense, tensors))
    devices, are_negated = list(map(_device, tensors)), list(map(_is_neg, tensors))
    are_plain = all(are_dense) and _COMPLEX.isdisjoint(dtypes)
    others = {
        number: (tensor.stride(), tensor.layout, tensor.is_conj(), is_transformed(tensor))
        for number, tensor in enumerate(() if are_plain else tensors)
        if not are_dense[number] or dtypes[number] in _COMPLEX
    }
    return list(map(_size, tensors)), dtypes, are_dense, types, devices, are_negated, others


def _places(tensors: Sequence[torch.Tensor], facts: Sequence[tuple[Any, ...]] | None) -> Places | None:
    """Return where tensors are; facts: None or those that they must have."""
    storages: list[torch.UntypedStorage] = []
    addresses: list[int] = []
    begins: list[int] = []
    bytes: list[int] = []
    for number, part in enumerate(_parts(tensors)):
        held, found = list(map(torch.Tensor.untyped_storage, part)), _addresses(part)
        # Whatever is changed meanwhile gets another address, or other facts in the same memory: then those of before
        # are true of what is there.
        if facts is not None and (_facts(part) != facts[number] or _addresses(part) != found):
            return None
        storages += held
        addresses += found
        begins += map(torch.UntypedStorage.data_ptr, held)
        bytes += map(torch.UntypedStorage.nbytes, held)
    sizes = np.array(bytes, dtype=np.int64)
    return Places(storages, np.array(begins, dtype=np.uint64), sizes, np.array(addresses, dtype=np.uint64))


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    try:
        return list(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:  # One has none.
        return list(map(_address, tensors))


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _described(tensor: torch.Tensor) -> str:
    try:
        kind = "Tensor" if type(tensor) in PLAIN_TENSORS else type(tensor).__name__
        return f"{tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}, {kind}"
    except _NOT_THERE:
        return f"a {type(tensor).__name__} without sizes or strides"


# -- shared memory -----------------------------------------------------------------------------------------------------


class LeafMemory:
    """Where the leaves of a state are, and which of them overlap.

    begins: their addresses, uint64 [leaves]. overlapping: in groups, those whose memory overlaps. turned: those whose
    elements fill their memory in another order than that of their dimensions.
    """

    def __init__(self, flat: FlatState, device_of: Callable[[torch.Tensor], int | None], addresses: U64) -> None:
        """Read it of a state whose leaves passed check_leaf. addresses: of FlatState.held."""
        spans = [
            0 if leaf in flat.sharded or not _has_address(tensor, device_of) else span_bytes(tensor)
            for leaf, tensor in enumerate(flat.tensors)
        ]
        self.turned = [
            leaf
            for leaf, tensor in enumerate(flat.tensors)
            if spans[leaf] and spans[leaf] == tensor.nbytes and not tensor.is_contiguous()
        ]
        self._spans: I64 = np.array(spans, dtype=np.int64)  # 0 of what shares nothing.
        self._some: I64 = np.flatnonzero(self._spans)
        self.begins = self._of_leaves(addresses)
        self.overlapping = self._overlapping(self.begins)

    def is_shared_alike(self, addresses: U64) -> bool:
        """Return whether leaves of the same facts share memory as these do. addresses: where FlatState.held are now."""
        begins = self._of_leaves(addresses)
        if np.array_equal(begins, self.begins):
            return True
        if not len(self._some) or _apart(self.overlapping, self.begins) != _apart(self._overlapping(begins), begins):
            return False
        self.begins = begins
        return True

    def _of_leaves(self, addresses: U64) -> U64:
        begins = np.zeros(len(self._spans), dtype=np.uint64)
        begins[self._some] = addresses[self._some]
        return begins

    def _overlapping(self, begins: U64) -> list[list[int]]:
        order = self._some[np.argsort(begins[self._some], kind="stable")]
        first, ends = begins[order], begins[order] + self._spans[order].astype(np.uint64)
        linked = np.flatnonzero(first[1:] < np.maximum.accumulate(ends)[:-1])
        if not len(linked):
            return []
        runs = np.split(linked, np.flatnonzero(np.diff(linked) > 1) + 1)
        return [sorted(order[run[0] : run[-1] + 2].tolist()) for run in runs]


def _apart(groups: Sequence[Sequence[int]], begins: U64) -> list[list[tuple[int, int]]]:
    """Return what sharing follows from: how far the memory of the leaves of each group is apart."""
    bases = [min(int(begins[leaf]) for leaf in group) // ALIGNMENT * ALIGNMENT for group in groups]
    return [
        [(leaf, int(begins[leaf]) - base) for leaf in group] for group, base in sorted(zip(groups, bases, strict=True))
    ]


def _has_address(tensor: torch.Tensor, device_of: Callable[[torch.Tensor], int | None]) -> bool:
    if tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.is_cpu or device_of(tensor) is not None
