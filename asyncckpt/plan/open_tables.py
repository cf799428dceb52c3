"""The shard files of tables that are exported behind the fence, window by window.

Such a table has a file of its own, and its columns are cut into blocks of the same rows, one of each column a window.
The blocks of a window lie together, so that a window leaves in one piece and in whatever order the table asks for; and
its rows are a number that makes every window begin on a page, as direct writes need.

    header | window 0: columns, widest elements first | window 1: ... | last window, shorter

The copy of the table's cache level has its place in the arena, behind the image of the other shard files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from asyncckpt.format.header import HeaderTemplate, render_header
from asyncckpt.format.names import shard_name
from asyncckpt.model.abilities import can_stay_open
from asyncckpt.model.block import BlockSpec, PlacedBlock
from asyncckpt.model.table import OpenCut, TableCut
from asyncckpt.native import PAGE_BYTES
from asyncckpt.options import CHUNK_BYTES
from asyncckpt.plan.image import key_of

MAP_ITEM_BYTES = 8


@dataclass(frozen=True)
class Window:
    """One window of a table: `offset` in its file; for each of its blocks (column, number in the plan, place in it)."""

    offset: int
    bytes: int
    blocks: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class CacheArea:
    """Where the copy of a table's cache level lies in the arena: the map, and every cached column (offset, bytes)."""

    map_offset: int
    map_rows: int
    columns: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class OpenTable:
    """One exported table: `table` is its number among the cuts, `blocks` the numbers of its blocks in the plan."""

    table: int
    name: str
    header: HeaderTemplate
    bytes: int
    window_rows: int
    windows: tuple[Window, ...]
    blocks: range
    cache: CacheArea


@dataclass(frozen=True)
class OpenTables:
    """All exported tables of a save, their blocks in manifest order, and how many bytes their caches take."""

    tables: tuple[OpenTable, ...] = ()
    blocks: tuple[PlacedBlock, ...] = ()
    cache_bytes: int = 0

    @property
    def payload_bytes(self) -> int:
        return sum(placed.spec.bytes for placed in self.blocks)


def can_be_exported(cut: TableCut, row_bytes: int) -> bool:
    """Whether a table can be left open: it offers it, it has rows, and a window of pages fits a chunk."""
    return can_stay_open(cut) and cut.rows_count > 0 and _window_rows(row_bytes) > 0


def plan_open_tables(
    items: Sequence[tuple[int, OpenCut, Sequence[BlockSpec]]],
    *,
    first_block: int,
    first_file: int,
    first_byte: int,
    rank: int,
) -> OpenTables:
    """Plan a file for each (number of the cut, cut, whole-column specs).

    first_block, first_file: how many blocks and files there are before; first_byte: where the arena is free.
    """
    tables: list[OpenTable] = []
    blocks: list[PlacedBlock] = []
    at = first_byte
    for index, (number, cut, specs) in enumerate(items):
        file_index = first_file + index
        row_bytes = sum(_bytes_of_row(spec) for spec in specs)
        rows = _window_rows(row_bytes)
        ordered = sorted(specs, key=lambda spec: -spec.stored_itemsize)
        parts = [_part(spec, begin, rows) for begin in range(0, cut.rows_count, rows) for spec in ordered]
        header = render_header([(key_of(part), part) for part in parts], rank=rank)
        placed, windows = _place(parts, len(header.text), per_window=len(ordered), file_index=file_index)
        begin = first_block + len(blocks)
        cache, at = _cache_area(cut, specs, at)
        table = OpenTable(
            table=number,
            name=shard_name(rank=rank, index=file_index),
            header=header,
            bytes=len(header.text) + sum(part.bytes for part in parts),
            window_rows=rows,
            windows=tuple(_numbered(window, begin) for window in windows),
            blocks=range(begin, begin + len(placed)),
            cache=cache,
        )
        tables.append(table)
        blocks += placed
    return OpenTables(tables=tuple(tables), blocks=tuple(blocks), cache_bytes=at - first_byte)


def _window_rows(row_bytes: int) -> int:
    """How many rows a window has: as many as a chunk holds, such that its bytes are whole pages; 0 when none fit."""
    unit = PAGE_BYTES // math.gcd(PAGE_BYTES, row_bytes)
    return CHUNK_BYTES // (row_bytes * unit) * unit


def _bytes_of_row(spec: BlockSpec) -> int:
    return math.prod(spec.stored_shape[1:]) * spec.stored_itemsize


def _part(spec: BlockSpec, begin: int, rows: int) -> BlockSpec:
    count = min(rows, spec.shape[0] - begin)
    if count == spec.shape[0]:
        return spec
    shape, stored = (count, *spec.shape[1:]), (count, *spec.stored_shape[1:])
    return replace(spec, shape=shape, stored_shape=stored, row_begin=begin, whole_shape=spec.shape)


def _place(
    parts: Sequence[BlockSpec], offset: int, *, per_window: int, file_index: int
) -> tuple[list[PlacedBlock], list[Window]]:
    """Put the parts one behind the other; block numbers count from 0."""
    placed: list[PlacedBlock] = []
    windows: list[Window] = []
    for first in range(0, len(parts), per_window):
        begin = offset
        blocks = []
        for number in range(first, first + per_window):
            spec = parts[number]
            blocks.append((str(spec.column), number, offset - begin))
            placed.append(PlacedBlock(spec=spec, key=key_of(spec), file_index=file_index, offset=offset))
            offset += spec.bytes
        windows.append(Window(offset=begin, bytes=offset - begin, blocks=tuple(blocks)))
    return placed, windows


def _numbered(window: Window, begin: int) -> Window:
    return replace(window, blocks=tuple((column, begin + number, at) for column, number, at in window.blocks))


def _cache_area(cut: OpenCut, specs: Sequence[BlockSpec], at: int) -> tuple[CacheArea, int]:
    """Give the cache level its place from `at`, every array on a page; returns where the arena is free again."""
    map_offset, map_rows = at, len(cut.cache_map)
    at += _paged(map_rows * MAP_ITEM_BYTES)
    columns: dict[str, tuple[int, int]] = {}
    for spec in specs:
        cached = cut.cached_column(str(spec.column))
        if isinstance(cached, torch.Tensor):
            columns[str(spec.column)] = (at, cached.nbytes)
            at += _paged(cached.nbytes)
    return CacheArea(map_offset=map_offset, map_rows=map_rows, columns=columns), at


def _paged(bytes: int) -> int:
    return -(-bytes // PAGE_BYTES) * PAGE_BYTES
