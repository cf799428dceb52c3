"""The shard files of tables that are exported after the fence, window by window.

Such a table has a file of its own, and its columns are cut into blocks of the same rows, one of each column a window.
The blocks of a window lie together, so that a window leaves in one piece and in whatever order the table asks for; and
its rows are a number that makes every window begin on a page, as direct writes need.

    header | window 0: columns, widest elements first | window 1: ... | last window, shorter

The copy of the table's cache level has its place in the arena, after the image of the other shard files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from asyncckpt.model.block import BlockSpec, PlacedBlock
from asyncckpt.model.table import DeferredCut, TableCut, can_be_deferred
from asyncckpt.native import paged
from asyncckpt.options import CHUNK_BYTES
from asyncckpt.plan.image import FilePlan, parts_of, place_files, rows_on_pages

MAP_ITEM_BYTES = 8


@dataclass(frozen=True)
class Window:
    """One window of a table: `offset` in its file; for each of its blocks (column, number, place in the window).

    Blocks are numbered through all deferred tables.
    """

    offset: int
    bytes: int
    blocks: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class CacheArea:
    """Where the copy of a table's cache level is in the arena: the map, and every cached column (offset, bytes)."""

    map_offset: int
    map_rows: int
    columns: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class DeferredTable:
    """One exported table: `table` is its number among the cuts."""

    table: int
    file: FilePlan
    window_rows: int
    windows: tuple[Window, ...]
    cache: CacheArea


@dataclass(frozen=True)
class DeferredTables:
    """All exported tables of a save, their blocks in manifest order, and how many bytes their caches and files take."""

    tables: tuple[DeferredTable, ...] = ()
    blocks: tuple[PlacedBlock, ...] = ()
    cache_bytes: int = 0
    files_bytes: int = 0


def can_be_exported(cut: TableCut, row_bytes: int) -> bool:
    """Return whether a table can be deferred: it offers it, it has rows, and a window of pages fits a chunk."""
    return can_be_deferred(cut) and cut.rows_count > 0 and _window_rows(row_bytes) > 0


def plan_deferred_tables(
    items: Sequence[tuple[int, DeferredCut, Sequence[BlockSpec]]], *, first_byte: int, rank: int
) -> DeferredTables:
    """Plan a file for each (number of the cut, cut, whole-column specs); they are the first files of the rank.

    first_byte: where the arena is free.
    """
    window_rows = [_window_rows(sum(_bytes_of_row(spec) for spec in specs)) for _, _, specs in items]
    parts: list[BlockSpec] = []
    numbers: list[range] = []
    for rows, (_, _, specs) in zip(window_rows, items, strict=True):
        first = len(parts)
        columns = [parts_of(spec, rows) for spec in sorted(specs, key=lambda spec: -spec.alignment)]
        parts += [part for window in zip(*columns, strict=True) for part in window]
        numbers.append(range(first, len(parts)))
    files, blocks = place_files(parts, numbers, rank=rank, first_file=0)
    tables: list[DeferredTable] = []
    at = first_byte
    for (number, cut, specs), rows, file in zip(items, window_rows, files, strict=True):
        cache, at = _cache_area(cut, specs, at)
        size = len(specs)
        windows = tuple(_window(file.blocks[i : i + size], blocks) for i in range(0, len(file.blocks), size))
        tables.append(DeferredTable(table=number, file=file, window_rows=rows, windows=windows, cache=cache))
    files_bytes = sum(file.bytes for file in files)
    return DeferredTables(tables=tuple(tables), blocks=blocks, cache_bytes=at - first_byte, files_bytes=files_bytes)


def _window_rows(row_bytes: int) -> int:
    """Return how many rows a window has: as many as fit a chunk and make whole pages; 0 when none do."""
    unit = rows_on_pages(row_bytes)
    return CHUNK_BYTES // (row_bytes * unit) * unit


def _bytes_of_row(spec: BlockSpec) -> int:
    return math.prod(spec.stored_shape[1:]) * spec.stored_itemsize


def _window(numbers: Sequence[int], blocks: Sequence[PlacedBlock]) -> Window:
    """Return the window that consists of these blocks, which lie one after the other."""
    begin = blocks[numbers[0]].offset
    return Window(
        offset=begin,
        bytes=sum(blocks[number].spec.bytes for number in numbers),
        blocks=tuple((str(blocks[number].spec.column), number, blocks[number].offset - begin) for number in numbers),
    )


def _cache_area(cut: DeferredCut, specs: Sequence[BlockSpec], at: int) -> tuple[CacheArea, int]:
    """Give the cache level its place from `at`, every array on a page; return where the arena is free again."""
    map_offset, map_rows = at, len(cut.cache_map)
    at += paged(map_rows * MAP_ITEM_BYTES)
    columns: dict[str, tuple[int, int]] = {}
    for spec in specs:
        cached = cut.cached_column(str(spec.column))
        if isinstance(cached, torch.Tensor):
            columns[str(spec.column)] = (at, cached.nbytes)
            at += paged(cached.nbytes)
    return CacheArea(map_offset=map_offset, map_rows=map_rows, columns=columns), at
