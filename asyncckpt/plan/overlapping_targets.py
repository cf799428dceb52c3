"""Targets whose memory overlaps: an element that several of them have is to get the same bits from all their sources.

    the same elements, blocks of the same bytes      one of them is filled, for all
    the same elements, blocks of other bytes         the checkpoint does not fit
    memory that overlaps in any other way, or        each is read into memory of its own, and put in its place when all
    blocks of another form (boxes, encodings)        is read; where one undoes another, the checkpoint does not fit

Left out are targets on devices whose addresses mean nothing here. Which may overlap, load_targets.py finds.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asyncckpt.errors import IncompatibleError
from asyncckpt.format.manifest import Chain
from asyncckpt.model.sharded import Piece
from asyncckpt.plan.contents import StoredDense
from asyncckpt.plan.load_targets import InPlace

# More targets in one run of memory than these are taken to overlap without a look at every pair.
_PAIRED_MAX = 64
_WORK_MAX = 10_000  # Of NumPy's search for an element that two have.


@dataclass(frozen=True)
class Apart:
    """A target that is filled by way of memory of its own: `read` is the same target there."""

    target: InPlace
    read: InPlace

    @classmethod
    def of(cls, target: InPlace) -> Apart:
        pieces = [Piece(torch.empty(p.tensor.shape, dtype=target.dtype, device="cpu"), p.begin) for p in target.pieces]
        read = InPlace(target.name, target.path, target.whole_shape, target.dtype, tuple(pieces))
        return cls(target, read)

    @property
    def tensors(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(to.tensor, of.tensor) for to, of in zip(self.target.pieces, self.read.pieces, strict=True)]


def put_in_place(apart: Sequence[Apart]) -> None:
    """Fill targets that overlap, now that they are read. IncompatibleError, with nothing changed, for what they cannot
    all hold.
    """
    pairs = [pair for item in apart for pair in item.tensors]
    before = [to.clone() for to, _ in pairs]
    for to, of in pairs:
        to.copy_(of)
    undone = [item.target.name for item in apart if not all(same_bits(to, of) for to, of in item.tensors)]
    if undone:
        for (to, _), own in zip(pairs, before, strict=True):
            to.copy_(own)
        raise IncompatibleError(
            "targets overlap in memory, and the checkpoint has other values for each",
            found=undone,
            hint="nothing was changed; load them one after the other",
        )


def overlaps(
    loads: Sequence[tuple[InPlace | None, StoredDense]], runs: Iterable[list[tuple[int, torch.Tensor]]], chain: Chain
) -> tuple[set[int], dict[int, Apart], list[str]]:
    """Return, of targets with their sources: those that another one fills, those to fill apart, and problems.

    runs: of their boxes, see `overlapping_runs`.
    """
    filled: set[int] = set()
    apart: dict[int, Apart] = {}
    problems: list[str] = []
    for run in runs:
        alike: dict[object, list[int]] = defaultdict(list)
        for index in dict.fromkeys(index for index, _ in run if index not in filled):
            own = alike[_target(loads[index]).memory()]
            found = [_same_bytes(loads[other][1], loads[index][1], chain) for other in own]
            if True in found:
                filled.add(index)
                continue
            if False in found:
                names = sorted(_target(loads[one]).name for one in (index, own[found.index(False)]))
                problems.append(f"{names} are the same memory, the checkpoint has different values for them")
            own.append(index)
        for index in _overlapping([(index, tensor) for index, tensor in run if index not in filled]):
            apart[index] = Apart.of(_target(loads[index]))
    return filled, apart, problems


def _target(load: tuple[InPlace | None, StoredDense]) -> InPlace:
    assert load[0] is not None
    return load[0]


def _same_bytes(one: StoredDense, other: StoredDense, chain: Chain) -> bool | None:
    """Return whether two stored tensors are the same bits; None: their digests do not tell."""
    if one.blocks == other.blocks:
        return True
    forms, digests = zip(*(_form(source, chain) for source in (one, other)), strict=True)
    if forms[0] != forms[1]:
        return None
    is_encoded = any(chain.blocks[number].placed.spec.encoding for number in (*one.blocks, *other.blocks))
    return True if digests[0] == digests[1] else None if is_encoded else False


def _form(source: StoredDense, chain: Chain) -> tuple[list[Any], list[bytes]]:
    """Return what a stored tensor consists of except its values, and the digests of these."""
    blocks = sorted((chain.blocks[number] for number in source.blocks), key=lambda block: block.placed.spec.begin)
    specs = [block.placed.spec for block in blocks]
    form = [(source.shape, spec.begin, spec.shape, spec.dtype, spec.encoding) for spec in specs]
    return form, [block.digest for block in blocks]


def _overlapping(boxes: Sequence[tuple[int, torch.Tensor]]) -> set[int]:
    """Return the numbers of those that have an element with another one in common, or may have."""
    if len(boxes) > _PAIRED_MAX:
        return {index for index, _ in boxes}
    views = [(index, _addresses(tensor)) for index, tensor in boxes]
    pairs = ((one, other) for one, other in itertools.combinations(views, 2) if _share(one[1], other[1]))
    return {index for pair in pairs for index, _ in pair}


class _Addresses:
    """The memory of a tensor as NumPy takes it, which does not look into it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
        }


def _addresses(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return np.asarray(_Addresses(tensor))


def _share(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    try:
        return np.shares_memory(one, other, max_work=_WORK_MAX)  # type: ignore[arg-type]  # It takes any int.
    except RuntimeError:  # Too hard to tell.
        return True


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype are the same bit for bit."""
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    own = tensor.cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return own.reshape(-1).view(torch.uint8)
