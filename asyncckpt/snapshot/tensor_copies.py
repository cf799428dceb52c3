"""Copies of tensors, or of rows of them, to places in host memory: by address where they have one, else by torch.

For a captured state, for boxes that somebody else has planned, and for a state that DCP stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.devices.fetch import to_host
from asyncckpt.devices.host_copies import HostCopies
from asyncckpt.devices.watches import Watch
from asyncckpt.errors import UsageError
from asyncckpt.native import I64, U64, core
from asyncckpt.native.tensors import Places
from asyncckpt.plan.dense_blocks import BY_HOST, BY_TORCH, CopyWays, TensorPieces
from asyncckpt.plan.leaf_checks import check_extent


@dataclass(frozen=True)
class LiveTensors:
    """Tensors, how they are copied, and the addresses of those that are copied by address; 0 for others.

    name: of a tensor by its number, for messages.
    """

    tensors: Sequence[torch.Tensor]
    ways: CopyWays
    begins: U64
    name: Callable[[int], str]

    @staticmethod
    def of(
        tensors: Sequence[torch.Tensor], ways: CopyWays, *, name: Callable[[int], str], places: Places | None = None
    ) -> LiveTensors:
        """Read the addresses; UsageError naming a tensor without memory, or whose storage was freed or shrunk.

        places: where the tensors are, if the caller has just read that.
        """
        by_address = ways.way != BY_TORCH
        if places is not None:
            ends = places["offset"] * ways.itemsizes + ways.bytes
            for number in np.flatnonzero(by_address & (ways.bytes > 0) & (ends > places["storage_bytes"])).tolist():
                check_extent(tensors[number], name(number))
            begins = np.where(by_address, places["address"], np.uint64(0))
        else:
            numbers = np.flatnonzero(by_address)
            own = tensors if len(numbers) == len(tensors) else [tensors[number] for number in numbers.tolist()]
            for index in shrunk_storages(own, bytes=ways.bytes[numbers], itemsizes=ways.itemsizes[numbers]):
                check_extent(own[index], name(int(numbers[index])))
            begins = np.zeros(len(tensors), dtype=np.uint64)
            begins[numbers] = addresses(own)
        for number in np.flatnonzero(by_address & (ways.bytes > 0) & (begins == 0)).tolist():
            raise UsageError(
                f"tensor {name(number)!r} has no memory", hint="it stands for values that torch has not made"
            )
        return LiveTensors(tensors=tensors, ways=ways, begins=begins, name=name)


def list_pieces(pieces: TensorPieces, live: LiveTensors, copies: HostCopies, memory: torch.Tensor) -> U64:
    """Return (source, target, bytes) of what the host has to copy now, by address, to places in `memory`, uint8.

    The rest goes to `copies`; what torch has to copy on the host is copied here and now.
    """
    ways, begins = live.ways.way[pieces.tensor], live.begins[pieces.tensor]
    segments = np.empty((len(pieces.tensor), 3), dtype=np.uint64)
    segments[:, 0] = begins + pieces.source_offset.astype(np.uint64)
    segments[:, 1] = pieces.place.astype(np.uint64) + np.uint64(memory.data_ptr())
    segments[:, 2] = pieces.bytes.astype(np.uint64)
    stepped = _add_stepped(pieces, live, copies, segments)
    for device in sorted(set(ways[ways >= 0].tolist())):
        copies.on(device).add(segments[(ways == device) & ~stepped], live.tensors)
        copies.on(device).add(segments[(ways == device) & stepped], live.tensors, stepped=True)
    by_torch = np.flatnonzero(ways == BY_TORCH)
    rows = [pieces.rows(number, live.tensors) for number in by_torch.tolist()]
    for place, tensor in zip(tensors_over(memory, pieces.place[by_torch], rows), rows, strict=True):
        copies.put(place, tensor)
    return np.ascontiguousarray(segments[(ways == BY_HOST) & (pieces.bytes > 0) & ~stepped])


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


def lay_rows(
    columns: Sequence[tuple[torch.Tensor, int, int]],
    rows: I64,
    places: I64 | None,
    copies: HostCopies,
    *,
    below: int | None = None,
) -> None:
    """Copy rows of columns (tensor, address on the host, row bytes) to their places; None: one behind the other.

    Rows on a device are listed in `copies`. below: the device from which what lies at the places is copied first.
    """
    if not len(rows):
        return
    on_host: list[tuple[int, int, int]] = []
    on_devices: dict[int, list[tuple[int, int, int]]] = {}
    kept: list[torch.Tensor] = []
    for source, target, row_bytes in columns:
        device = copies.device_of(source)
        if device is not None and below in (None, device) and source.is_contiguous():
            on_devices.setdefault(device, []).append((source.data_ptr(), target, row_bytes))
            kept.append(source)
        elif device is None and below is None and source.is_cpu and source.is_contiguous():
            on_host.append((source.data_ptr(), target, row_bytes))
        else:  # Brought over here and now: strides, other devices, rows that have to wait for those below.
            found = to_host(source.index_select(0, torch.from_numpy(rows).to(source.device)))
            own = np.array([(found.data_ptr(), target, row_bytes)], dtype=np.uint64)
            _put(found, own, places, len(rows), copies, below)
    if on_host:
        core.copy_rows(np.array(on_host, dtype=np.uint64), rows, places)
    for device, own_columns in on_devices.items():
        copies.on(device).add_rows(np.array(own_columns, dtype=np.uint64), rows, places, kept)


def _put(
    found: torch.Tensor, columns: U64, places: I64 | None, count: int, copies: HostCopies, below: int | None
) -> None:
    """Put rows that are on the host in their places; when those below are there."""
    in_order = np.arange(count, dtype=np.int64)

    def put() -> None:
        assert len(found) == count
        core.copy_rows(columns, in_order, places)

    if below is None:
        put()
    else:
        copies.on(below).add_work(put)


def addresses(tensors: Sequence[torch.Tensor]) -> U64:
    """Return the address of every tensor's first element, uint64 [n]."""
    return np.fromiter(map(torch.Tensor.data_ptr, tensors), dtype=np.uint64, count=len(tensors))


def shrunk_storages(tensors: Sequence[torch.Tensor], *, bytes: I64, itemsizes: I64) -> list[int]:
    """Return which contiguous tensors have a freed or shrunk storage: a raw copy would read foreign memory."""
    count = len(tensors)
    storages = map(torch.Tensor.untyped_storage, tensors)
    held = np.fromiter(map(torch.UntypedStorage.nbytes, storages), dtype=np.int64, count=count)
    begins = np.fromiter(map(torch.Tensor.storage_offset, tensors), dtype=np.int64, count=count) * itemsizes
    return [int(index) for index in np.flatnonzero((bytes > 0) & (begins + bytes > held))]
