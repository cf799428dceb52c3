"""Copy one cut of everything into an arena: one native call for all memory of the host that has an address.

1. Gather (source, target, bytes) of every contiguous dense leaf and every run of rows of every table.
2. One `core.copy` over all of those on the host, on all cores, without the GIL. Those on devices are listed, to be
   launched by whoever captures (devices/host_copies.py).
3. What has no plain address (strided views, conjugated tensors) is copied by torch into its place, before.
4. The rows that cache levels hold are laid over those of their storage.

Tables that have regions in the arena are captured beside, see table_capture.py; their runs join the native copy. Only
the cache level of a deferred table is copied, and the table keeps what changes from now on. When `capture` has returned
and the copies are launched the live state may change: the fence.

Tensors are looked at right before they are copied, here, for boxes that somebody else has planned, and for a state that
DCP stages; and again where tables were captured, or torch has copied, since. Signal handlers, finalizers and other
threads may have run since the plan was made, while the call waited, touched memory or copied without the interpreter
lock. So what is copied has the facts of the plan. Otherwise a new plan takes the place of one of an earlier save, and a
save that has made its plan itself is refused by the name of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.errors import CheckpointError
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.row_runs import spans, window
from asyncckpt.model.source import one_behind_the_other
from asyncckpt.model.table import CacheCopy, TableCut, can_be_deferred
from asyncckpt.native import I64, U8, U64, core
from asyncckpt.plan.deferred_tables import MAP_ITEM_BYTES, CacheArea
from asyncckpt.plan.dense_blocks import BY_HOST, BY_TORCH, CopyWays, TensorPieces
from asyncckpt.plan.leaf_facts import LeafFacts, LeafMemory, changed, read_places, without_memory
from asyncckpt.plan.leaf_memory import check_extent
from asyncckpt.plan.save_plan import CutTable, SavePlan
from asyncckpt.plan.state import FlatState, still

if TYPE_CHECKING:
    from asyncckpt.devices.host_copies import DeviceCopies
    from asyncckpt.devices.step_copies import StepCopies
    from asyncckpt.snapshot.overlay import Overlay
    from asyncckpt.snapshot.table_capture import TableCapture


class NotAsPlanned(Exception):
    """The tensors of the state are not what was planned; nothing was captured.

    error: for a save that made that plan itself. has_waited: they were, before the call has waited.
    """

    def __init__(self, error: CheckpointError) -> None:
        super().__init__(error)
        self.error, self.has_waited = error, False


Segments = NDArray[np.uint64]
NO_SEGMENTS: Segments = np.empty((0, 3), dtype=np.uint64)


class Copies(Protocol):
    """The copies of one save: the host's alone (CopiesOnHost), or with devices (devices/host_copies.py).

    steps: what the host copies after the call; None: nothing.
    """

    @property
    def steps(self) -> StepCopies | None: ...

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """Return the device from which a tensor is copied; None: the host reads it."""
        ...

    def can_compare(self, device: int) -> bool:
        """Return whether a device can compare rows."""
        ...

    def put(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the values of any tensor to a contiguous one on the host, now or with the other copies."""
        ...

    def on(self, device: int) -> DeviceCopies:
        """Return the copies of a device, to add to them."""
        ...


class CopiesOnHost:
    """Those of a process that uses no devices."""

    steps = None

    def device_of(self, tensor: torch.Tensor) -> int | None:
        return None

    def can_compare(self, device: int) -> bool:
        return False

    def put(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def on(self, device: int) -> DeviceCopies:
        raise AssertionError("this process uses no devices")


def capture(
    plan: SavePlan,
    flat: FlatState,
    cuts: Sequence[CutTable],
    *,
    image: U8,
    copies: Copies,
    tables: Sequence[TableCapture] = (),
) -> None:
    """Fill `image`, the bytes of the arena that the plan has, with all blocks, and the regions of `tables`.

    What has to come from devices is added to `copies`. Headers are written by the shard room. NotAsPlanned; UsageError
    where tensors change meanwhile.
    """
    memory = torch.from_numpy(image)
    live = first_look(plan, flat)
    by_torch = bool((plan.ways.way[plan.pieces.tensor] == BY_TORCH).any())
    if by_torch:
        put_by_torch(plan.pieces, live, copies, memory)
    segments = [table.segments() for table in tables]
    for number, (index, column) in plan.columns.items():
        segments.append(_column_segments(plan, cuts[index], column, number, copies, image))
    caches = [_cache_copy(item.cache, cuts[item.table].cut, copies, image) for item in plan.deferred.tables]
    segments += [found for _, found in caches]
    if by_torch or cuts:  # Others have run meanwhile.
        live = look_at(plan, flat.now)
    segments.append(list_pieces(plan.pieces, live, copies, memory))
    core.copy(np.ascontiguousarray(np.concatenate(segments)))  # What is copied is held by `live`.
    for table in tables:
        table.gather()
    if plan.columns:
        _lay_over(plan, cuts, image, copies)
    for item, (cache, _) in zip(plan.deferred.tables, caches, strict=True):
        cut = cuts[item.table].cut
        assert can_be_deferred(cut)
        cut.be_deferred(cache, window_rows=item.window_rows)


def first_look(plan: SavePlan, flat: FlatState) -> LiveTensors:
    """Return the tensors of a state. NotAsPlanned."""
    try:
        return look_at(plan, flat.now)
    except CheckpointError as error:
        raise NotAsPlanned(error) from error


def look_at(plan: SavePlan, tensors: Sequence[torch.Tensor]) -> LiveTensors:
    """Return the tensors of a state, to be copied now. UsageError for those that are not what was planned."""
    return look(tensors, plan.ways, name=plan.name_of, facts=plan.facts, memory=plan.memory)


def block_bytes(plan: SavePlan, number: int, image: U8) -> U8:
    """Return a block's place in the arena; no copy."""
    begin, length = int(plan.image.offsets[number]), int(plan.image.lengths[number])
    return image[begin : begin + length]


def block_tensor(plan: SavePlan, number: int, image: U8) -> torch.Tensor:
    """Return the same as a tensor of its true dtype and shape."""
    return as_tensor(block_bytes(plan, number, image), plan.image.blocks[number].spec)


def as_tensor(raw: U8, spec: BlockSpec) -> torch.Tensor:
    """Return bytes as a tensor of the block's true dtype and shape; shares the memory."""
    dtype = dtype_by_name(spec.dtype, owner=spec.name).dtype
    if raw.size == 0:
        return torch.empty(spec.shape, dtype=dtype, device="cpu")
    return torch.from_numpy(raw).view(dtype).reshape(spec.shape)


def _column_segments(plan: SavePlan, item: CutTable, column: str, number: int, copies: Copies, image: U8) -> Segments:
    """Return what the host copies of a column of a table; the segments of a device are added to its copies."""
    spec = plan.image.blocks[number].spec
    tensor = item.cut.column(column)
    runs = window(item.cut.runs, spec.row_begin, spec.row_begin + spec.shape[0])
    if spec.bytes == 0:
        return NO_SEGMENTS
    device = copies.device_of(tensor)
    if not tensor.is_contiguous() or (device is None and not tensor.is_cpu):
        targets = torch.split(block_tensor(plan, number, image), (runs[:, 1] - runs[:, 0]).tolist())
        for target, (begin, end) in zip(targets, runs.tolist(), strict=True):
            copies.put(target, tensor[begin:end])
        return NO_SEGMENTS
    found = spans(runs, address=tensor.data_ptr(), row_bytes=spec.bytes // spec.shape[0])
    segments = one_behind_the_other(found, image.ctypes.data + int(plan.image.offsets[number]))
    if device is None:
        return segments
    copies.on(device).add(segments, tensor)
    return NO_SEGMENTS


def _lay_over(plan: SavePlan, cuts: Sequence[CutTable], image: U8, copies: Copies) -> None:
    from asyncckpt.snapshot.overlay import Overlay  # It imports this module.

    overlays: dict[int, Overlay | None] = {}
    for number, (table, column) in plan.columns.items():
        if table not in overlays:
            overlays[table] = Overlay.of(cuts[table].cut)
        overlay = overlays[table]
        if overlay is not None:
            begin = plan.image.blocks[number].spec.row_begin
            overlay.lay_over(column, block_tensor(plan, number, image), copies, begin=begin)


def _cache_copy(area: CacheArea, cut: TableCut, copies: Copies, image: U8) -> tuple[CacheCopy, Segments]:
    """Return the places of a cache level's arrays in the arena, and what one native copy brings there.

    What is on a device is added to its copies.
    """
    assert can_be_deferred(cut)
    end = area.map_offset + area.map_rows * MAP_ITEM_BYTES
    cache_map = image[area.map_offset : end].view(np.int64)
    segments = [(cut.cache_map.data_ptr(), cache_map.ctypes.data, cache_map.nbytes)]
    columns = {}
    for name, (begin, length) in area.columns.items():
        cached = cut.cached_column(name)
        assert cached is not None
        target = torch.from_numpy(image[begin : begin + length]).view(cached.dtype).reshape(cached.shape)
        segment = (cached.data_ptr(), target.data_ptr(), target.nbytes)
        device = copies.device_of(cached)
        if not cached.is_contiguous() or (device is None and not cached.is_cpu):
            copies.put(target, cached)
        elif device is None:
            segments.append(segment)
        else:
            copies.on(device).add(np.array([segment], dtype=np.uint64), cached)
        columns[name] = target
    found = np.array([segment for segment in segments if segment[2]], dtype=np.uint64).reshape(-1, 3)
    return CacheCopy(map=cache_map, columns=columns), found


# -- tensors -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LiveTensors:
    """Tensors, how they are copied, and the addresses of those that are copied by address; 0 for others.

    Valid as long as it is held, whatever memory the tensors get: their storages are held, and those that torch copies
    are tensors of their own. It ends only where somebody frees or resizes that memory itself. name: what messages call
    a tensor, by its number.
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
    facts, memory: the plan's; None for tensors that nobody else can change (FlatState.held_still), and where it does
    not matter which of them share memory.
    """
    copied = ways.spans > 0
    by_torch = copied & (ways.way == BY_TORCH)
    seen = list(tensors)
    for number in np.flatnonzero(by_torch).tolist():
        seen[number] = still(seen[number])
    try:
        places = read_places(seen) if facts is None else facts.places(seen)
    except RuntimeError:  # One is of a kind now that has no memory.
        places = None
    if places is None:
        assert facts is not None
        raise facts.difference(tensors, name)
    for number in np.flatnonzero(by_torch).tolist():
        check_extent(seen[number], name(number))
    copied &= ~by_torch
    for number in np.flatnonzero(copied & (places.addresses == 0)).tolist():
        check_extent(seen[number], name(number))
        raise without_memory(name(number))
    offsets = places.addresses.astype(np.int64) - places.begins.astype(np.int64)
    for number in np.flatnonzero(copied & ((offsets < 0) | (offsets + ways.spans > places.bytes))).tolist():
        check_extent(seen[number], name(number))
        raise changed(f"tensor {name(number)!r} has got other memory")
    if memory is not None and not memory.is_shared_alike(places.addresses):
        raise changed("the memory that tensors of the state share has changed")
    begins = np.where(copied, places.addresses, np.uint64(0))
    return LiveTensors(tensors=seen, ways=ways, begins=begins, storages=places.storages, name=name)


def list_pieces(pieces: TensorPieces, live: LiveTensors, copies: Copies, memory: torch.Tensor) -> U64:
    """Return (source, target, bytes) of what the host has to copy now, by address, to places in `memory`, uint8.

    What devices have to copy goes to `copies`.
    """
    ways, begins = live.ways.way[pieces.tensor], live.begins[pieces.tensor]
    segments = np.empty((len(pieces.tensor), 3), dtype=np.uint64)
    segments[:, 0] = begins + pieces.source_offset.astype(np.uint64)
    segments[:, 1] = pieces.place.astype(np.uint64) + np.uint64(memory.data_ptr())
    segments[:, 2] = pieces.bytes.astype(np.uint64)
    stepped = np.zeros(len(segments), dtype=np.bool_)
    if copies.steps is not None:
        stepped = _add_stepped(pieces, live, copies.steps, segments)
    for device in sorted(set(ways[ways >= 0].tolist())):
        copies.on(device).add(segments[(ways == device) & ~stepped], live.storages)
        copies.on(device).add(segments[(ways == device) & stepped], live.storages, stepped=True)
    return np.ascontiguousarray(segments[(ways == BY_HOST) & (pieces.bytes > 0) & ~stepped])


def put_by_torch(pieces: TensorPieces, live: LiveTensors, copies: Copies, memory: torch.Tensor) -> None:
    """Copy what torch has to copy, on the host here and now: apart from the others, for torch gives up the lock."""
    by_torch = np.flatnonzero(live.ways.way[pieces.tensor] == BY_TORCH).tolist()
    rows = [pieces.rows(number, live.tensors) for number in by_torch]
    for number, place, tensor in zip(by_torch, tensors_over(memory, pieces.place[by_torch], rows), rows, strict=True):
        check_extent(tensor, live.name(int(pieces.tensor[number])))  # All else about it stays as it is.
        copies.put(place, tensor)


def _add_stepped(pieces: TensorPieces, live: LiveTensors, steps: StepCopies, segments: U64) -> NDArray[np.bool_]:
    """Let steps of optimizers wait for what only they change; return which pieces that are, bool [n].

    Those on the host are copied after the call.
    """
    from asyncckpt.devices.watches import Watch  # Only Savers that are given optimizers need it.

    memory, tensors = steps.memory, pieces.tensor
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
        steps.add(owner, watch, segments[own[by_host]], of[by_host])
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
