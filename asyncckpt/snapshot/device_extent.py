"""Which bytes of an arena devices will write to, known before the first save, so that they are pinned ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asyncckpt.devices.current_runtime import device_of
from asyncckpt.model.abilities import is_overlaid
from asyncckpt.plan.regions import Regions
from asyncckpt.plan.save_plan import CutTable, SavePlan
from asyncckpt.plan.state import FlatState


def device_extent(plan: SavePlan, flat: FlatState, cuts: Sequence[CutTable], regions: Regions) -> tuple[int, int]:
    """The bytes [begin, end) between which they all are; (0, 0): none. Before the fence of the cuts."""
    found = list(_extents(plan, flat, cuts, regions))
    return min((begin for begin, _ in found), default=0), max((end for _, end in found), default=0)


def _extents(plan: SavePlan, flat: FlatState, cuts: Sequence[CutTable], regions: Regions) -> Iterator[tuple[int, int]]:
    for region in regions.tables:
        for name, column in region.columns.items():
            if _is_on_device(cuts[region.table], name):
                yield column.offset, column.offset + region.rows_max * column.row_bytes
    for pieces in plan.on_devices.values():
        ends = pieces.place + pieces.bytes
        yield regions.bytes + int(pieces.place.min()), regions.bytes + int(ends.max())
    numbers = [number for number in plan.foreign if device_of(flat.held[plan.sources[number].tensor]) is not None]
    numbers += [number for number, (table, column) in plan.columns.items() if _is_on_device(cuts[table], column)]
    for number in numbers:
        begin = regions.bytes + int(plan.image.offsets[number])
        yield begin, begin + int(plan.image.lengths[number])
    for item in plan.deferred.tables:
        for name, (begin, length) in item.cache.columns.items():
            if _is_on_device(cuts[item.table], name):
                yield regions.bytes + begin, regions.bytes + begin + length


def _is_on_device(item: CutTable, column: str) -> bool:
    """Whether either level of a column is on a device."""
    cached = item.cut.cached_column(column) if is_overlaid(item.cut) else None
    return any(level is not None and device_of(level) is not None for level in (item.cut.column(column), cached))
