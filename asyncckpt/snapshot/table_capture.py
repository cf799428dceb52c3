"""Bring tables into their regions of an arena.

    the arena holds           the save wants       copied
    nothing of the table      all rows             all: runs by one native copy, tails and cached rows by index
    an earlier snapshot       all rows             rows written since, and those that stand elsewhere now, by index;
                                                   on a device those whose print has changed, if the table has no marks
    whatever                  some rows (a delta)  these by index, one after the other

By index costs more per row than a plain copy does. So a column of which too large a share would be copied (the narrower
the less, see by_index_share_max) is copied plainly. On a device a plain copy takes all places at once, holes too, which
the tails then fill: many short runs are one long piece.

1. `TableCapture` finds out what has to be copied.
2. `segments`: what a plain copy brings over; the capture joins them with those of the dense tensors.
3. `gather`: copies the rows that are copied by index; cached rows of a multi-level table win over those of its storage.

Weights and optimizer slots on the host that only steps of an optimizer change are copied after the call, where they
are many (devices/step_copies.py). Ids and metadata change in forward, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.model.block import TableFacts
from asyncckpt.model.row_places import RowPlaces, TableContents
from asyncckpt.model.table import (
    ID_COLUMN,
    CutVersion,
    OverlaidCut,
    Role,
    is_overlaid,
    is_watched,
    tracks_ids,
    tracks_rows,
)
from asyncckpt.model.torch_use import uses_devices
from asyncckpt.native import I64, U8, U64, core
from asyncckpt.plan.regions import CapturedTable, TableRegion, TableRows
from asyncckpt.plan.save_plan import CutTable
from asyncckpt.snapshot.capture import Copies

if TYPE_CHECKING:  # Where all is on the host, nothing of it is needed.
    from asyncckpt.devices.copies import DeviceFingerprints
    from asyncckpt.devices.step_copies import Chunk
    from asyncckpt.devices.watches import Watch

# Where copying by index and a plain copy take the same time, for rows of at least WIDE_ROW_BYTES; narrower ones take as
# long by index and less in a plain copy. Measured: bench/results/2026-11-21-rows.txt, by `python -m bench.rows`.
REFRESH_SHARE_MAX = 0.4
WIDE_ROW_BYTES = 64

# The same for a column on a device, from what is known of links, not measured: a row of its own is a write of its own
# over the link, with some 24 bytes of header for at most 128 of the row, so that wide rows go at four fifths of the
# speed of a plain copy and rows of 8 bytes at a quarter; and the host spends some nanoseconds to name a row, in which a
# plain copy brings over 100 bytes while the host does nothing. The numbers of the rows, 16 bytes for each, so take at
# most a sixteenth of the pinned memory that the column itself takes.
DEVICE_SHARE_MAX = 0.5
DEVICE_WIDE_ROW_BYTES = 128
# Plain copies on a device have pieces of so much, so that a part of a column can go by way of scratch memory.
DEVICE_PIECE_BYTES = 64 << 20

# Less than this of a table is copied sooner than it is left to another thread.
LATER_BYTES_MIN = 1 << 20


def by_index_share_max(row_bytes: int, *, on_device: bool) -> float:
    """Return above which share of the rows a column is copied plainly."""
    if on_device:
        return DEVICE_SHARE_MAX * min(1.0, row_bytes / DEVICE_WIDE_ROW_BYTES)
    return REFRESH_SHARE_MAX * min(1.0, row_bytes / WIDE_ROW_BYTES)


class TableCapture:
    """One table on its way into its region of the arena, whose bytes are `image`."""

    def __init__(
        self,
        item: CutTable,
        region: TableRegion,
        chosen: TableRows,
        *,
        held: TableContents | None,
        image: U8,
        copies: Copies,
        compare: bool = False,
    ) -> None:
        self._item, self._region, self._chosen, self._copies = item, region, chosen, copies
        self._address, self._image = int(image.ctypes.data), image
        cut = item.cut
        self.version: CutVersion | None = cut.version if tracks_rows(cut) else None
        # Asked for once, and held until all is copied or listed.
        self._columns = {name: cut.column(name) for name in region.columns}
        self.places: RowPlaces | None = None
        self._rows: I64 | None = chosen.rows  # Storage rows to copy by index; None: no such choice, all of them.
        self._id_rows: I64 | None = chosen.rows  # The same of the ids, of which fewer change.
        self._plain: set[str] = set()  # Columns that are copied plainly.
        if chosen.is_whole:
            self.places = RowPlaces.of(cut.runs, cut.rows_count, None if held is None else held.places)
            self._rows, self._id_rows = _to_refresh(item, self.places, held)
            self._plain = {name for name, column in region.columns.items() if self._is_plain(name, column.row_bytes)}
        # Row i of the storage stands at place i, and nothing is laid over it.
        is_fixed = self.places is not None and not len(self.places.tails) and not is_overlaid(cut)
        self._compare = compare and is_fixed and self.version is None
        self._fingerprints_before: Mapping[int, object] = {} if held is None else held.fingerprints
        self.fingerprints: dict[int, DeviceFingerprints] = {}
        self._later: frozenset[str] = frozenset()  # Columns that are copied behind the call.
        self._later_runs: dict[str, U64] = {}
        self._later_rows: list[tuple[list[str], I64, I64 | None]] = []

    def _is_plain(self, name: str, row_bytes: int) -> bool:
        rows = self._id_rows if name == ID_COLUMN else self._rows
        share_max = by_index_share_max(row_bytes, on_device=self._copies.device_of(self._columns[name]) is not None)
        return rows is None or len(rows) > share_max * self._item.cut.rows_count

    @property
    def name(self) -> str:
        return self._item.name

    @property
    def captured(self) -> CapturedTable:
        """What will be in the region."""
        cut, chosen = self._item.cut, self._chosen
        facts = TableFacts(
            name=self._item.name,
            rows_count=chosen.count(cut.rows_count),
            shard=self._item.shard,
            whole=chosen.is_whole,
            removed_count=len(chosen.removed),
        )
        by_index = self._rows is not None and len(self._plain) < len(self._region.columns)
        copied_count = len(self._rows) if by_index and self._rows is not None else cut.rows_count
        return CapturedTable(
            region=self._region,
            schema=self._item.schema,
            facts=facts,
            version=self.version,
            places=self.places,
            copied_count=copied_count,
        )

    @property
    def contents(self) -> TableContents | None:
        """What a later save can bring up to date; None: nothing."""
        if self.places is None or (self.version is None and not self.fingerprints):
            return None
        return TableContents(version=self.version, places=self.places, fingerprints=self.fingerprints)

    def segments(self) -> U64:
        """Return (source, target, bytes) of runs of columns that are copied plainly; devices' ones go to `copies`."""
        cut = self._item.cut
        runs = cut.runs[cut.runs[:, 0] < cut.rows_count]
        begins = runs[:, 0]
        counts = np.minimum(runs[:, 1], cut.rows_count) - begins
        self._later = self._find_later()
        found = [np.empty((0, 3), dtype=np.uint64)]
        compared: dict[int, list[str]] = {}
        for name, column in self._region.columns.items():
            if name not in self._plain:
                continue
            storage, target = self._columns[name], self._address + column.offset
            device = self._copies.device_of(storage)
            if device is not None and self._compare and self._copies.can_compare(device):
                compared.setdefault(device, []).append(name)
                continue
            if device is not None:
                self._copies.on(device).add(
                    _pieces(storage.data_ptr(), target, cut.rows_count * column.row_bytes), storage
                )
                continue
            segments = np.empty((len(runs), 3), dtype=np.uint64)
            segments[:, 0] = storage.data_ptr() + begins * column.row_bytes
            segments[:, 1] = target + begins * column.row_bytes
            segments[:, 2] = counts * column.row_bytes
            if name in self._later:
                self._later_runs[name] = segments
            else:
                found.append(segments)
        for device, names in compared.items():
            self._add_compared(device, names)
        return np.concatenate(found)

    def _add_compared(self, device: int, names: Sequence[str]) -> None:
        """Copy the rows of columns on a device that differ from those in the arena."""
        columns = [self._column(name, self._columns[name]) for name in names]
        rows = np.array([(source.data_ptr(), target, size) for source, target, size in columns], dtype=np.uint64)
        from asyncckpt.devices.copies import DeviceFingerprints

        now = self.fingerprints[device] = DeviceFingerprints(tuple(names), self._item.cut.rows_count)
        self._copies.on(device).add_changed_rows(rows, self._fingerprints_before.get(device), now, columns)

    def gather(self) -> None:
        """Copy what is copied by index; after the plain copy. Rows on devices go to `copies`."""
        cut = self._item.cut
        plain = [name for name in self._columns if name in self._plain]
        by_index = [name for name in self._columns if name not in self._plain]
        if plain:
            assert self.places is not None
            self._copy(plain, self.places.tails, self.places.holes)
        apart = [ID_COLUMN] if self._id_rows is not self._rows and ID_COLUMN in by_index else []
        for names, rows in ((apart, self._id_rows), ([name for name in by_index if name not in apart], self._rows)):
            if names:
                assert rows is not None
                self._copy(names, rows, self._targets(rows))
        if is_overlaid(cut):
            self._lay_over(cut, plain, None)
            self._lay_over(cut, by_index, self._rows)
        if self._region.removed is not None:
            at = self._region.removed.offset
            self._image[at : at + self._chosen.removed.nbytes] = self._chosen.removed.view(np.uint8)
        self._leave()

    def _find_later(self) -> frozenset[str]:
        """Return the columns that are copied after the call."""
        cut, steps = self._item.cut, self._copies.steps
        if steps is None or steps.memory.owner_of(self._item.table) is None:
            return frozenset()
        if is_overlaid(cut) or not is_watched(cut):
            return frozenset()
        rows_count = cut.rows_count if self._rows is None else len(self._rows)
        found, bytes = [], 0
        for column in self._item.schema.columns:
            storage, region = self._columns.get(column.name), self._region.columns.get(column.name)
            if column.role not in (Role.WEIGHT, Role.OPTIMIZER) or storage is None or region is None:
                continue
            if self._copies.device_of(storage) is None and storage.is_cpu and storage.is_contiguous():
                found.append(column.name)
                bytes += region.row_bytes * (cut.rows_count if column.name in self._plain else rows_count)
        return frozenset(found) if bytes >= LATER_BYTES_MIN else frozenset()

    def _leave(self) -> None:
        """Leave columns to be copied after the call."""
        if not self._later:
            return
        assert self._copies.steps is not None
        owner, cut = self._copies.steps.memory.owner_of(self._item.table), self._item.cut
        assert owner is not None
        assert is_watched(cut)
        columns = {name: self._columns[name] for name in self._columns if name in self._later}
        self._copies.steps.add_table(owner, self.name, cut, columns, self._chunks)

    def _chunks(self, watch: Watch) -> list[Chunk]:
        from asyncckpt.devices.step_copies import chunks_of, row_chunks

        numbers = {name: number for number, name in enumerate(name for name in self._columns if name in self._later)}
        chunks: list[Chunk] = []
        for name, runs in self._later_runs.items():
            chunks += chunks_of(runs, np.full(len(runs), numbers[name], dtype=np.int64), watch)
        for names, rows, places in self._later_rows:
            found = [self._column(name, self._columns[name]) for name in names]
            columns = np.array([(source.data_ptr(), target, size) for source, target, size in found], dtype=np.uint64)
            chunks += row_chunks(columns, rows, places, watch, [numbers[name] for name in names])
        return chunks

    def _targets(self, rows: I64) -> I64 | None:
        """Return where storage rows go; None: one after the other."""
        return None if self.places is None else self.places.of_rows(rows)

    def _lay_over(self, cut: OverlaidCut, names: Collection[str], wanted: I64 | None) -> None:
        """Copy the rows that the cache level holds, as far as they are wanted (storage rows, ascending; None: all)."""
        columns = {name: cut.cached_column(name) for name in names if name != ID_COLUMN}
        cached = {name: column for name, column in columns.items() if column is not None}
        if not cached:
            return
        cache_map = cut.cache_map.numpy()
        cache_rows = np.flatnonzero(cache_map >= 0)
        rows = cache_map[cache_rows]
        if wanted is not None:
            inside = _among(rows, wanted)
            cache_rows, rows = cache_rows[inside], rows[inside]
        targets = self._targets(rows)
        if targets is None:
            assert wanted is not None
            targets = np.searchsorted(wanted, rows)
        by_storage: dict[int | None, list[tuple[torch.Tensor, int, int]]] = {}
        for name, source in cached.items():
            by_storage.setdefault(self._copies.device_of(self._columns[name]), []).append(self._column(name, source))
        for below, own in by_storage.items():
            lay_rows(own, cache_rows, targets, self._copies, below=below)

    def _copy(self, names: Collection[str], rows: I64, places: I64 | None) -> None:
        now = [self._column(name, self._columns[name]) for name in names if name not in self._later]
        if later := [name for name in names if name in self._later]:
            self._later_rows.append((later, rows, places))
        lay_rows(now, rows, places, self._copies)

    def _column(self, name: str, source: torch.Tensor) -> tuple[torch.Tensor, int, int]:
        region = self._region.columns[name]
        return source, self._address + region.offset, region.row_bytes


def _pieces(source: int, target: int, bytes: int) -> U64:
    """Return one long copy as segments of at most DEVICE_PIECE_BYTES."""
    begins = np.arange(0, bytes, DEVICE_PIECE_BYTES, dtype=np.int64)
    sizes = np.minimum(DEVICE_PIECE_BYTES, bytes - begins)
    return np.stack([source + begins, target + begins, sizes], axis=1).astype(np.uint64)


def _to_refresh(item: CutTable, places: RowPlaces, held: TableContents | None) -> tuple[I64 | None, I64 | None]:
    """Return storage rows that differ from the snapshot held, and those whose id does, ascending; None: copy all."""
    cut = item.cut
    if held is None or held.version is None or not tracks_rows(cut):
        return None, None
    touched = cut.touched_since(held.version)
    if touched is None:
        return None, None
    moved = places.moved_since(held.places)
    rows = np.union1d(touched, moved) if len(moved) else touched
    begun = cut.begun_since(held.version) if tracks_ids(cut) else None
    if begun is None:
        return rows, rows
    begun = begun[_among(begun, touched)]  # Others are free again.
    return rows, np.union1d(begun, moved) if len(moved) else begun


def _among(rows: I64, wanted: I64) -> NDArray[np.bool_]:
    """Return which of rows are in wanted, ascending: bool [n]."""
    if not len(wanted) or not len(rows):
        return np.zeros(len(rows), dtype=np.bool_)
    # A mask instead of a search, which takes ten times as long.
    mask = np.zeros(int(max(wanted[-1], rows.max(initial=0))) + 1, dtype=np.bool_)
    mask[wanted] = True
    found: NDArray[np.bool_] = mask[rows]
    return found


def lay_rows(
    columns: Sequence[tuple[torch.Tensor, int, int]],
    rows: I64,
    places: I64 | None,
    copies: Copies,
    *,
    below: int | None = None,
) -> None:
    """Copy rows of columns (tensor, address on the host, row bytes) to their places; None: one after the other.

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
            found = _rows_here(source, rows)
            own = np.array([(found.data_ptr(), target, row_bytes)], dtype=np.uint64)
            _put(found, own, places, len(rows), copies, below)
    if on_host:
        core.copy_rows(np.array(on_host, dtype=np.uint64), rows, places)
    for device, own_columns in on_devices.items():
        copies.on(device).add_rows(np.array(own_columns, dtype=np.uint64), rows, places, kept)


def _rows_here(source: torch.Tensor, rows: I64) -> torch.Tensor:
    """Return rows of a tensor on the host, contiguous."""
    chosen = source.index_select(0, torch.from_numpy(rows).to(source.device))
    if chosen.is_cpu and not uses_devices():
        return chosen
    from asyncckpt.devices.fetch import to_host

    return to_host(chosen)


def _put(found: torch.Tensor, columns: U64, places: I64 | None, count: int, copies: Copies, below: int | None) -> None:
    """Put rows that are on the host in their places; when those below are there."""
    in_order = np.arange(count, dtype=np.int64)

    def put() -> None:
        assert len(found) == count
        core.copy_rows(columns, in_order, places)

    if below is None:
        put()
    else:
        copies.on(below).add_work(put)
