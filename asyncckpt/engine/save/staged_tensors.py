"""Copies of many tensors in one piece of host memory: those on the CPU made at once, those on devices by a fence.

The memory is an arena, if there is one to be had at once, pinned for the devices that write to it. It goes back to the
pool when the last tensor over it is gone. Else it is memory of its own.

#   arena        by                 when
#   lent         StagedTensors      it was filled, or copies to it are on their way
#   given back   weakref.finalize   nobody holds a tensor over it any more, or a device has failed

What is staged is usually written, again and again, by the same plan (box_files.py). So the plan's places are remembered
by the sizes of the tensors (`remember_places`), and the next state of the same sizes is staged where the plan wants it:
its arena is written as it is, without a second copy.

    image of the plan, with room for headers and for what could not be put in place | tensors that have no place there
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncckpt.devices.current_runtime import check_not_capturing, device_of
from asyncckpt.devices.host_copies import Pending
from asyncckpt.engine.save.device_stage import DeviceStage
from asyncckpt.errors import DeadlineError, DeviceError
from asyncckpt.native import I64, U8, U64, core
from asyncckpt.options import SaveOptions
from asyncckpt.plan.dense_blocks import CopyWays, TensorPieces
from asyncckpt.plan.image import ImagePlan
from asyncckpt.plan.state import still
from asyncckpt.signals import uninterrupted
from asyncckpt.snapshot.capture import list_pieces, look, put_by_torch, tensors_over
from asyncckpt.staging.pool import Arena, pool
from asyncckpt.system import register_at_fork

_ALIGNMENT = 64
PLACES_KEPT_MAX = 2


@dataclass(frozen=True)
class Places:
    """Where tensors of these sizes are put. begins: int64 [tensors]. image: the plan whose places they have."""

    sizes: I64
    itemsizes: I64
    begins: I64
    bytes: int
    image: ImagePlan | None = None

    def fit(self, sizes: I64, itemsizes: I64) -> bool:
        """Return whether they are for tensors like these."""
        return np.array_equal(sizes, self.sizes) and np.array_equal(itemsizes, self.itemsizes)


@dataclass(frozen=True)
class LentArena:
    """An arena while somebody holds tensors over it, and where they are."""

    arena: Arena
    places: Places


# The places that were of use last, and by address the arenas that are lent.
_remembered: list[Places] = []
_lent: dict[int, LentArena] = {}


class StagedTensors:
    """Contiguous copies on the CPU of tensors on any device, in their order.

    When it is made, the host has copied its own; of devices, the streams that are current wait until theirs are copied.
    `settle` must be called before anything is read, and before the last reference to `tensors` goes. UsageError for a
    tensor whose storage is gone, and inside the capture of a graph; DeviceError.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], options: SaveOptions) -> None:
        check_not_capturing("a save")
        tensors = list(map(still, tensors))  # Nobody can give these another form or other memory.
        ways = CopyWays.of(tensors, device_of)
        sizes, itemsizes = ways.bytes, ways.itemsizes
        places = next((item for item in _remembered if item.fit(sizes, itemsizes)), None)
        places = places or _one_behind_the_other(sizes, itemsizes)
        arena = free_arena(places.bytes, limit_bytes=options.host_memory_limit)
        self._lease: weakref.finalize[[LentArena], U8] | None = None
        memory = torch.empty(places.bytes if arena is None else 0, dtype=torch.uint8, device="cpu")
        if arena is not None:
            memory = self._lend(LentArena(arena, places))
        self.tensors = tensors_over(memory, places.begins, tensors)
        numbers = np.arange(len(tensors), dtype=np.int64)
        pieces = TensorPieces(tensor=numbers, source_offset=numbers * 0, place=places.begins, bytes=sizes)
        self._pending = Pending()
        try:
            self._pending = copy_pieces(pieces, tensors, ways, _name_of, memory=memory, arena=arena, options=options)
        except BaseException:
            self._end_lease()
            raise

    @property
    def is_settled(self) -> bool:
        """Whether nothing is on its way."""
        return not self._pending.devices

    def settle(self) -> None:
        """Wait until all copies are there; from any thread. DeviceError."""
        try:
            self._pending.settle()
        except (DeviceError, DeadlineError):  # The pool keeps the memory from others.
            self._end_lease()
            raise

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease()

    def _lend(self, lent: LentArena) -> torch.Tensor:
        """Return the bytes of an arena, for as long as anything uses them."""
        lent.arena.seal()
        pool.lend(lent.arena)
        view = lent.arena.view()[: lent.places.bytes]
        _lent[lent.arena.address] = lent
        # torch keeps the array as long as the storage that is made of it, and so as long as any view of that.
        self._lease = weakref.finalize(view, _give_back, lent)
        self._lease.atexit = False
        return torch.from_numpy(view)


def _name_of(number: int) -> str:
    return f"tensor {number} of the state"


@uninterrupted
def _give_back(lent: LentArena) -> None:
    if _lent.get(lent.arena.address) is lent:  # In a forked child it is the parent's.
        del _lent[lent.arena.address]
        pool.release(lent.arena)


def free_arena(bytes: int, *, limit_bytes: int | None) -> Arena | None:
    """Return an arena if one is free at once, else None: others may be held for long."""
    if not pool.fits(bytes, limit_bytes=limit_bytes):
        return None
    try:
        return pool.acquire(bytes, deadline_s=0, limit_bytes=limit_bytes)
    except DeadlineError:
        return None


def copy_pieces(
    pieces: TensorPieces,
    tensors: Sequence[torch.Tensor],
    ways: CopyWays,
    name: Callable[[int], str],
    *,
    memory: torch.Tensor,
    arena: Arena | None,
    options: SaveOptions,
    threads: int = 0,
) -> Pending:
    """Copy pieces to their places in memory, that of an arena if there is one; those of devices are on their way then.

    tensors: those that nobody else can give another form. threads: for the host's copy, 0: all cores. UsageError inside
    the capture of a graph, and for a storage that is gone; DeviceError.
    """
    copies = DeviceStage(options)
    put_by_torch(pieces, look(tensors, ways, name=name), copies, memory)
    live = look(tensors, ways, name=name)
    core.copy(list_pieces(pieces, live, copies, memory), threads=threads)
    return copies.launch() if arena is None else copies.launch_into(arena)


def lent_arena(begins: U64) -> LentArena | None:
    """Return the arena in which tensors at these addresses are staged, or some of them."""
    for address, lent in _lent.copy().items():
        if np.any((begins >= address) & (begins < address + lent.places.bytes)):
            return lent
    return None


def remember_places(image: ImagePlan, pieces: TensorPieces, begins: U64, bytes: I64) -> None:
    """Stage tensors like those that are staged now at their places in an image the next time.

    begins, bytes: addresses and sizes of the tensors of the pieces. What is not a staged tensor as a whole, and in one
    piece, gets a place after the image.
    """
    lent = lent_arena(begins)
    if lent is None:
        return
    was = lent.places
    staged_of = {begin: number for number, begin in enumerate(was.begins.tolist()) if was.sizes[number]}
    in_image: dict[int, int] = {}
    for tensor, size, place in zip(pieces.tensor.tolist(), pieces.bytes.tolist(), pieces.place.tolist(), strict=True):
        number = staged_of.get(int(begins[tensor]) - lent.arena.address)
        if number is not None and size == bytes[tensor] == was.sizes[number] and not place % was.itemsizes[number]:
            in_image.setdefault(number, place)
    others = np.ones(len(was.sizes), dtype=np.bool_)
    others[list(in_image)] = False
    behind = _one_behind_the_other(was.sizes[others], was.itemsizes[others])
    new = np.empty_like(was.begins)
    new[others] = behind.begins + image.bytes
    for number, place in in_image.items():
        new[number] = place
    places = Places(was.sizes, was.itemsizes, new, image.bytes + behind.bytes, image)
    others_kept = [item for item in _remembered if not item.fit(was.sizes, was.itemsizes)]
    _remembered[:] = [places, *others_kept][:PLACES_KEPT_MAX]


def _one_behind_the_other(sizes: I64, itemsizes: I64) -> Places:
    rounded = -(-sizes // _ALIGNMENT) * _ALIGNMENT
    begins = np.cumsum(rounded) - rounded
    return Places(sizes, itemsizes, begins, int(rounded.sum()))


# Arena memory is not inherited by forked children, where tensors of others may lie at its addresses.
register_at_fork(after_in_child=_lent.clear)
