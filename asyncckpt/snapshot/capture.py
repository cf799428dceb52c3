"""Copy one cut of everything into an arena: one native call for all memory of the host that has an address.

1. Gather (source, target, bytes) of every contiguous dense leaf and every run of rows of every table.
2. One `core.copy` over all of those on the host, on all cores, without the GIL. Those on devices are listed, to be
   launched by whoever captures (devices/host_copies.py).
3. What has no plain address (strided views, conjugated tensors) is copied by torch into its place.
4. The rows that cache levels hold are laid over those of their storage.

Tables that have regions in the arena are captured beside, see table_capture.py; their runs join the native copy. Of a
table that is deferred only the cache level is copied, and the table keeps what changes from now on. When
`capture` has returned and the copies are launched the live state may change: the fence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.devices.host_copies import HostCopies
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.model.abilities import can_be_deferred
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.row_runs import spans, window
from asyncckpt.model.table import CacheCopy, TableCut
from asyncckpt.native import U8, core
from asyncckpt.plan.deferred_tables import MAP_ITEM_BYTES, CacheArea
from asyncckpt.plan.leaf_facts import addresses, check_extent, shrunk_storages
from asyncckpt.plan.save_plan import CutTable, SavePlan
from asyncckpt.plan.state import FlatState
from asyncckpt.snapshot.overlay import Overlay
from asyncckpt.snapshot.table_capture import TableCapture
from asyncckpt.snapshot.tensor_copies import piece_segments

Segments = NDArray[np.uint64]
NO_SEGMENTS: Segments = np.empty((0, 3), dtype=np.uint64)


def capture(
    plan: SavePlan,
    flat: FlatState,
    cuts: Sequence[CutTable],
    *,
    address: int,
    image: U8,
    copies: HostCopies,
    tables: Sequence[TableCapture] = (),
) -> None:
    """Fill the arena from `address` on (its bytes are `image`) with all blocks, and the regions of `tables`.

    What has to come from devices is added to `copies`. Headers are written by the shard room.
    """
    begins = check_storages(plan, flat)
    segments = [piece_segments(plan.raw, begins, address), *(table.segments(copies) for table in tables)]
    held = flat.held
    sizes = np.zeros(len(held), dtype=np.int64)
    sizes[list(plan.raw_tensors)] = plan.raw_bytes
    for device, blocks in plan.on_devices.items():
        found = piece_segments(blocks, begins, address)
        stepped = copies.is_stepped(begins[blocks.tensor], sizes[blocks.tensor])
        copies.on(device).add(found[~stepped], held)
        copies.on(device).add(found[stepped], held, stepped=True)
    for number, (index, column) in plan.columns.items():
        segments.append(_column_segments(plan, cuts[index], column, number, copies, address=address, image=image))
    caches = [_cache_copy(item.cache, cuts[item.table], image) for item in plan.deferred.tables]
    for item, cache in zip(plan.deferred.tables, caches, strict=True):
        segments.append(_cache_segments(cuts[item.table].cut, cache, copies))
    core.copy(np.ascontiguousarray(np.concatenate(segments)))
    for table in tables:
        table.gather(copies)
    _lay_over(plan, cuts, image, copies)
    for number in plan.foreign:
        source = dense_rows(plan, flat, number).detach()
        copies.put(block_tensor(plan, number, image), source)
    for item, cache in zip(plan.deferred.tables, caches, strict=True):
        cut = cuts[item.table].cut
        assert can_be_deferred(cut)
        cut.be_deferred(cache, window_rows=item.window_rows)


def check_storages(plan: SavePlan, flat: FlatState) -> NDArray[np.uint64]:
    """The addresses of all tensors that are copied by address, 0 for others: uint64, as FlatState.held.

    UsageError naming a tensor whose storage was freed or shrunk since the plan was made.
    """
    held = flat.held
    numbers = np.array(plan.raw_tensors, dtype=np.int64)
    tensors = held if len(numbers) == len(held) else [held[number] for number in plan.raw_tensors]
    shrunk = shrunk_storages(tensors, bytes=plan.raw_bytes, itemsizes=plan.raw_itemsizes)
    suspects = {plan.raw_tensors[index] for index in shrunk}
    named = list(plan.foreign)
    if suspects:
        named += [number for number, source in plan.sources.items() if source.tensor in suspects]
    for number in named:
        check_extent(held[plan.sources[number].tensor], plan.image.blocks[number].spec.name)
    begins = np.zeros(len(held), dtype=np.uint64)
    begins[numbers] = addresses(tensors)
    return begins


def block_bytes(plan: SavePlan, number: int, image: U8) -> U8:
    """A block's place in the arena; no copy."""
    begin, length = int(plan.image.offsets[number]), int(plan.image.lengths[number])
    return image[begin : begin + length]


def block_tensor(plan: SavePlan, number: int, image: U8) -> torch.Tensor:
    """The same as a tensor of its true dtype and shape."""
    return as_tensor(block_bytes(plan, number, image), plan.image.blocks[number].spec)


def as_tensor(raw: U8, spec: BlockSpec) -> torch.Tensor:
    """Bytes as a tensor of the block's true dtype and shape; shares the memory."""
    dtype = dtype_by_name(spec.dtype, owner=spec.name).dtype
    if raw.size == 0:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.from_numpy(raw).view(dtype).reshape(spec.shape)


def _column_segments(
    plan: SavePlan, item: CutTable, column: str, number: int, copies: HostCopies, *, address: int, image: U8
) -> Segments:
    """What the host copies of a column of a table; the segments of a device are added to its copies."""
    spec = plan.image.blocks[number].spec
    tensor = item.cut.column(column)
    runs = window(item.cut.runs, spec.row_begin, spec.row_begin + spec.shape[0])
    if spec.bytes == 0:
        return NO_SEGMENTS
    device = copies.device_of(tensor)
    if not tensor.is_contiguous() or (device is None and not tensor.is_cpu):
        _copy_rows(tensor, runs, block_tensor(plan, number, image), copies)
        return NO_SEGMENTS
    found = spans(runs, address=tensor.data_ptr(), row_bytes=_row_bytes(spec))
    ends = np.cumsum(found[:, 1])
    segments = np.empty((len(found), 3), dtype=np.uint64)
    segments[:, 0] = found[:, 0]
    segments[:, 1] = ends - found[:, 1] + np.uint64(address + int(plan.image.offsets[number]))
    segments[:, 2] = found[:, 1]
    if device is None:
        return segments
    copies.on(device).add(segments, tensor)
    return NO_SEGMENTS


def _lay_over(plan: SavePlan, cuts: Sequence[CutTable], image: U8, copies: HostCopies) -> None:
    overlays: dict[int, Overlay | None] = {}
    for number, (table, column) in plan.columns.items():
        if table not in overlays:
            overlays[table] = Overlay.of(cuts[table].cut)
        overlay = overlays[table]
        if overlay is not None:
            begin = plan.image.blocks[number].spec.row_begin
            overlay.lay_over(column, block_tensor(plan, number, image), copies, begin=begin)


def _cache_copy(area: CacheArea, item: CutTable, image: U8) -> CacheCopy:
    """The places of a cache level's arrays in the arena, as arrays."""
    assert can_be_deferred(item.cut)
    columns = {}
    for name, (begin, length) in area.columns.items():
        cached = item.cut.cached_column(name)
        assert cached is not None
        columns[name] = torch.from_numpy(image[begin : begin + length]).view(cached.dtype).reshape(cached.shape)
    end = area.map_offset + area.map_rows * MAP_ITEM_BYTES
    return CacheCopy(map=image[area.map_offset : end].view(np.int64), columns=columns)


def _cache_segments(cut: TableCut, copy: CacheCopy, copies: HostCopies) -> Segments:
    """What one native copy brings over of a cache level; what is on a device is added to its copies."""
    assert can_be_deferred(cut)
    segments = [(cut.cache_map.data_ptr(), copy.map.ctypes.data, copy.map.nbytes)]
    for name, target in copy.columns.items():
        cached = cut.cached_column(name)
        assert cached is not None
        segment = (cached.data_ptr(), target.data_ptr(), target.nbytes)
        device = copies.device_of(cached)
        if not cached.is_contiguous() or (device is None and not cached.is_cpu):
            copies.put(target, cached)
        elif device is None:
            segments.append(segment)
        else:
            copies.on(device).add(np.array([segment], dtype=np.uint64), cached)
    return np.array([segment for segment in segments if segment[2]], dtype=np.uint64).reshape(-1, 3)


def _copy_rows(tensor: torch.Tensor, runs: NDArray[np.int64], target: torch.Tensor, copies: HostCopies) -> None:
    at = 0
    for begin, end in runs.tolist():
        copies.put(target[at : at + end - begin], tensor[begin:end])
        at += end - begin


def dense_rows(plan: SavePlan, flat: FlatState, number: int) -> torch.Tensor:
    """The live rows of a dense block."""
    source, spec = plan.sources[number], plan.image.blocks[number].spec
    tensor = flat.held[source.tensor]
    return tensor[source.first_row : source.first_row + spec.shape[0]] if spec.is_part and spec.shape else tensor


def _row_bytes(spec: BlockSpec) -> int:
    return max(1, spec.bytes // max(1, spec.shape[0]))
