"""Copy one cut of everything into an arena: one native call for all memory of the host that has an address.

1. Gather (source, target, bytes) of every contiguous dense leaf and every run of rows of every table.
2. One `core.copy` over all of those on the host, on all cores, without the GIL. Those on devices are listed, to be
   launched by whoever captures (devices/host_copies.py).
3. What has no plain address (strided views, conjugated tensors) is copied by torch into its place, before.
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
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.row_runs import spans, window
from asyncckpt.model.source import one_behind_the_other
from asyncckpt.model.table import CacheCopy, TableCut, can_be_deferred
from asyncckpt.native import U8, core
from asyncckpt.plan.deferred_tables import MAP_ITEM_BYTES, CacheArea
from asyncckpt.plan.dense_blocks import BY_TORCH
from asyncckpt.plan.save_plan import CutTable, SavePlan
from asyncckpt.plan.state import FlatState
from asyncckpt.snapshot.overlay import Overlay
from asyncckpt.snapshot.table_capture import TableCapture
from asyncckpt.snapshot.tensor_copies import LiveTensors, list_pieces, look, put_by_torch

Segments = NDArray[np.uint64]
NO_SEGMENTS: Segments = np.empty((0, 3), dtype=np.uint64)


def capture(
    plan: SavePlan,
    flat: FlatState,
    cuts: Sequence[CutTable],
    *,
    image: U8,
    copies: HostCopies,
    tables: Sequence[TableCapture] = (),
) -> None:
    """Fill `image`, the bytes of the arena that the plan has, with all blocks, and the regions of `tables`.

    What has to come from devices is added to `copies`. Headers are written by the shard room.
    """
    memory = torch.from_numpy(image)
    if (plan.ways.way[plan.pieces.tensor] == BY_TORCH).any():
        put_by_torch(plan.pieces, look_at(plan, flat.now), copies, memory)
    segments = [table.segments(copies) for table in tables]
    for number, (index, column) in plan.columns.items():
        segments.append(_column_segments(plan, cuts[index], column, number, copies, image))
    caches = [_cache_copy(item.cache, cuts[item.table].cut, copies, image) for item in plan.deferred.tables]
    segments += [found for _, found in caches]
    live = look_at(plan, flat.now)  # Held until the copy has ended.
    segments.append(list_pieces(plan.pieces, live, copies, memory))
    core.copy(np.ascontiguousarray(np.concatenate(segments)))
    for table in tables:
        table.gather(copies)
    _lay_over(plan, cuts, image, copies)
    for item, (cache, _) in zip(plan.deferred.tables, caches, strict=True):
        cut = cuts[item.table].cut
        assert can_be_deferred(cut)
        cut.be_deferred(cache, window_rows=item.window_rows)


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


def _column_segments(
    plan: SavePlan, item: CutTable, column: str, number: int, copies: HostCopies, image: U8
) -> Segments:
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


def _lay_over(plan: SavePlan, cuts: Sequence[CutTable], image: U8, copies: HostCopies) -> None:
    overlays: dict[int, Overlay | None] = {}
    for number, (table, column) in plan.columns.items():
        if table not in overlays:
            overlays[table] = Overlay.of(cuts[table].cut)
        overlay = overlays[table]
        if overlay is not None:
            begin = plan.image.blocks[number].spec.row_begin
            overlay.lay_over(column, block_tensor(plan, number, image), copies, begin=begin)


def _cache_copy(area: CacheArea, cut: TableCut, copies: HostCopies, image: U8) -> tuple[CacheCopy, Segments]:
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
