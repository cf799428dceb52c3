"""Copies of tensors, or of rows of them, to places in host memory: by address where they have one, else by torch.

For a captured state, for boxes that somebody else has planned, and for a state that DCP stages. All of them call `look`
right before they copy. Signal handlers, finalizers and other threads may have run since the plan was made, while the
call waited, touched memory or copied without the interpreter lock. So what is copied has the facts of the plan, or the
save is refused by the name of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.devices.host_copies import HostCopies
from asyncckpt.devices.watches import Watch
from asyncckpt.native import I64, U64
from asyncckpt.plan.dense_blocks import BY_HOST, BY_TORCH, CopyWays, TensorPieces
from asyncckpt.plan.leaf_facts import LeafFacts, changed, read_places, without_memory
from asyncckpt.plan.leaf_memory import LeafMemory, check_extent
from asyncckpt.plan.state import still


@dataclass(frozen=True)
class LiveTensors:
    """Tensors, how they are copied, and the addresses of those that are copied by address; 0 for others.

    Valid as long as it is held, whatever memory the tensors get: their storages are held, and those that torch copies
    are tensors of their own. It ends only where somebody frees or resizes that memory itself. name: of a tensor by its
    number, for messages.
    """

    tensors: Sequence[torch.Tensor]
    ways: CopyWays
    begins: U64
    storages: Sequence[torch.UntypedStorage]
    name: Callable[[int], str]


def look(
    tensors: Sequence[torch.Tensor],
    ways: CopyWays,
    *,
    name: Callable[[int], str],
    facts: LeafFacts | None = None,
    memory: LeafMemory | None = None,
) -> LiveTensors:
    """Read where tensors are, compare with the facts of the plan, and hold what is to be copied.

    UsageError naming a tensor that has become another one, or has no memory, or whose storage was freed or shrunk.
    facts, memory: of the plan; None of tensors that nobody else can change (FlatState.held_still), and where it does
    not matter which of them share memory.
    """
    copied = ways.spans > 0
    seen = list(tensors)
    try:
        for number in np.flatnonzero(copied & (ways.way == BY_TORCH)).tolist():
            seen[number] = still(seen[number])
        storages = list(map(torch.Tensor.untyped_storage, seen))  # First: what is read of them stays true then.
        places = read_places(seen) if facts is None else facts.places(seen)
        held = np.fromiter(map(torch.UntypedStorage.data_ptr, storages), dtype=np.uint64, count=len(storages))
    except (RuntimeError, ValueError):  # One is of a kind now that has no memory.
        places = None
    if places is None:
        assert facts is not None
        raise facts.difference(tensors, name)
    offsets = places["offset"] * ways.itemsizes
    for number in np.flatnonzero(copied & (offsets + ways.spans > places["storage_bytes"])).tolist():
        check_extent(seen[number], name(number))
        raise changed(f"tensor {name(number)!r} has become another one", found="a storage that was shrunk for a moment")
    copied &= ways.way != BY_TORCH
    for number in np.flatnonzero(copied & (places["address"] == 0)).tolist():
        raise without_memory(name(number))
    for number in np.flatnonzero(copied & (places["address"] - offsets.astype(np.uint64) != held)).tolist():
        raise changed(f"tensor {name(number)!r} has become another one", found="memory that it got at this moment")
    if memory is not None and not memory.is_shared_alike(places["address"]):
        raise changed("tensors of the state have become others", found="others of them that share memory")
    begins = np.where(copied, places["address"], np.uint64(0))
    return LiveTensors(tensors=seen, ways=ways, begins=begins, storages=storages, name=name)


def list_pieces(pieces: TensorPieces, live: LiveTensors, copies: HostCopies, memory: torch.Tensor) -> U64:
    """Return (source, target, bytes) of what the host has to copy now, by address, to places in `memory`, uint8.

    What devices have to copy goes to `copies`.
    """
    ways, begins = live.ways.way[pieces.tensor], live.begins[pieces.tensor]
    segments = np.empty((len(pieces.tensor), 3), dtype=np.uint64)
    segments[:, 0] = begins + pieces.source_offset.astype(np.uint64)
    segments[:, 1] = pieces.place.astype(np.uint64) + np.uint64(memory.data_ptr())
    segments[:, 2] = pieces.bytes.astype(np.uint64)
    stepped = _add_stepped(pieces, live, copies, segments)
    for device in sorted(set(ways[ways >= 0].tolist())):
        copies.on(device).add(segments[(ways == device) & ~stepped], live.storages)
        copies.on(device).add(segments[(ways == device) & stepped], live.storages, stepped=True)
    return np.ascontiguousarray(segments[(ways == BY_HOST) & (pieces.bytes > 0) & ~stepped])


def put_by_torch(pieces: TensorPieces, live: LiveTensors, copies: HostCopies, memory: torch.Tensor) -> None:
    """Copy what torch has to copy, on the host here and now: apart from the others, for torch gives up the lock."""
    by_torch = np.flatnonzero(live.ways.way[pieces.tensor] == BY_TORCH).tolist()
    rows = [pieces.rows(number, live.tensors) for number in by_torch]
    for number, place, tensor in zip(by_torch, tensors_over(memory, pieces.place[by_torch], rows), rows, strict=True):
        check_extent(tensor, live.name(int(pieces.tensor[number])))  # All else about it stays as it is.
        copies.put(place, tensor)


def _add_stepped(pieces: TensorPieces, live: LiveTensors, copies: HostCopies, segments: U64) -> NDArray[np.bool_]:
    """Let steps of optimizers wait for what only they change; return which pieces that are, bool [n].

    Those on the host are copied behind the call.
    """
    memory, tensors = copies.steps.memory, pieces.tensor
    found = memory.find(live.begins[tensors], live.ways.bytes[tensors])
    stepped: NDArray[np.bool_] = (found >= 0) & (pieces.bytes > 0)
    for owner in sorted(set(memory.owners[found[stepped]].tolist())):
        own = np.flatnonzero(stepped & (memory.owners[found] == owner))
        numbers, firsts, of = _distinct(tensors[own])
        places = found[own[firsts]].tolist()
        try:
            watch = Watch.of_tensors(
                held=[live.tensors[number] for number in numbers.tolist()],
                storages=[live.storages[number] for number in numbers.tolist()],
                stepped=[part[place] for part in (memory.tensors, memory.counted) for place in places],
                name=partial(_name_of, live, numbers),
            )
        except RuntimeError:  # Of one of them torch does not count the writes: they are copied now.
            stepped[own] = False
            continue
        by_host = live.ways.way[tensors[own]] == BY_HOST
        copies.steps.add(owner, watch, segments[own[by_host]], of[by_host])
    return stepped


def _distinct(values: I64) -> tuple[I64, I64, I64]:
    """Return the distinct values in order, where each comes first, and which of them each value is.

    As np.unique, which imports the module for masked arrays.
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    is_new = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    of = np.empty(len(values), dtype=np.int64)
    of[order] = np.cumsum(is_new) - 1
    return ordered[is_new], order[is_new], of


def _name_of(live: LiveTensors, numbers: I64, index: int) -> str:
    return live.name(int(numbers[index]))


def tensors_over(memory: torch.Tensor, begins: I64, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous tensors of the dtypes and shapes of others over `memory`, uint8, from byte `begins` on.

    A begin is a multiple of the dtype's size. Nothing is copied.
    """
    typed: dict[torch.dtype, torch.Tensor] = {}
    made: list[torch.Tensor] = []
    for tensor, begin in zip(like, begins.tolist(), strict=True):
        if not tensor.numel():
            made.append(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
            continue
        whole = typed.get(tensor.dtype)
        if whole is None:
            size = tensor.dtype.itemsize
            whole = typed[tensor.dtype] = memory[: len(memory) // size * size].view(tensor.dtype)
        like_it = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        offset = whole.storage_offset() + begin // tensor.dtype.itemsize
        made.append(whole.as_strided(tensor.shape, like_it.stride(), offset))
    return made
