"""The layout of shard files: which file every block goes to, at which offset, and where in an arena its bytes are.

A file is a header and its blocks, one after the other. In a file, arrays are ordered by element size (largest first),
so that every array starts aligned although safetensors allows no gaps. What a file's bytes are written from is a list
of extents of an arena:

    blocks without a place of their own   get one: the arena holds the files as they will be, each from a page on with
                                          room for its header, so a file is one extent
    blocks that lie apart in the arena    each begins on a page there and so has to begin on a page of the file. The
                                          rest of its last page is an array of its own, a pad: zeros, role "pad"
    deferred tables                       have no extents; their rows are exported by windows (deferred_tables.py)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from asyncckpt.format.dtypes import stored_dtype
from asyncckpt.format.names import shard_name
from asyncckpt.format.tree import unique_names
from asyncckpt.format.write_manifest import HeaderTemplate, render_header
from asyncckpt.model.block import BlockSpec, PlacedBlock
from asyncckpt.model.table import Role
from asyncckpt.native import I64, PAGE_BYTES, paged
from asyncckpt.options import BLOCK_BYTES_MAX, FILE_TARGET_BYTES

PAD_NAME = "#pad"


# Given blocks, and at most how many files there may be: the numbers of the blocks of each file.
Spread = Callable[[Sequence[BlockSpec], int], list[list[int]]]


@dataclass(frozen=True)
class FilePlan:
    """One shard file; `blocks` are the numbers of its blocks, pads included, in file order.

    extents: (offset in the arena, bytes) of what the file is written from. has_header_room: the first one begins with
    room for the header, else the header comes before it.
    """

    name: str
    header: HeaderTemplate
    bytes: int
    blocks: tuple[int, ...]
    extents: tuple[tuple[int, int], ...] = ()
    has_header_room: bool = False


@dataclass(frozen=True)
class ImagePlan:
    """Shard files of one rank, and their blocks: those that were asked for in their order, then the pads.

    `offsets` and `lengths` place every block in the arena, int64 [blocks]. bytes: what the files take of the arena, if
    they were given their places there. pads: (offset in the arena, bytes) of what has to be zeroed.
    """

    blocks: tuple[PlacedBlock, ...]
    files: tuple[FilePlan, ...]
    bytes: int
    offsets: I64
    lengths: I64
    pads: tuple[tuple[int, int], ...] = ()


def spread_by_bytes(specs: Sequence[BlockSpec], parallel: int) -> list[list[int]]:
    """Return the numbers of the blocks of each file: at least one file, at most one per FILE_TARGET_BYTES.

    The largest block goes first, into the emptiest file.
    """
    total = sum(spec.bytes for spec in specs)
    count = max(1, min(parallel, len(specs), -(-total // FILE_TARGET_BYTES)))
    members: list[list[int]] = [[] for _ in range(count)]
    if count == 1:
        members = [list(range(len(specs)))]
    else:
        loads = [(0, index) for index in range(count)]
        for number in sorted(range(len(specs)), key=lambda n: (-specs[n].bytes, n)):
            load, index = heapq.heappop(loads)
            members[index].append(number)
            heapq.heappush(loads, (load + specs[number].bytes, index))
        members = [numbers for numbers in members if numbers]
    return [sorted(numbers, key=lambda n: (-specs[n].alignment, n)) for numbers in members]


def plan_image(
    specs: Sequence[BlockSpec],
    *,
    parallel: int,
    rank: int,
    first_file: int = 0,
    needs_file: bool = True,
    spread: Spread = spread_by_bytes,
) -> ImagePlan:
    """Spread blocks over at most `parallel` files, and give the files their places in an arena.

    first_file: the number of the first file. needs_file: without blocks there is a file all the same. spread: which
    block goes into which file.
    """
    members = spread(specs, parallel) if specs or needs_file else []
    placed, blocks = place_files(specs, members, rank=rank, first_file=first_file)
    offsets = np.zeros(len(specs), dtype=np.int64)
    files: list[FilePlan] = []
    base = 0
    for file in placed:
        files.append(replace(file, extents=((base, file.bytes),), has_header_room=True))
        for number in file.blocks:
            offsets[number] = base + blocks[number].offset
        base += paged(file.bytes)
    return ImagePlan(blocks=blocks, files=tuple(files), bytes=base, offsets=offsets, lengths=_lengths(specs))


def plan_apart(
    specs: Sequence[BlockSpec], places: Sequence[int], *, parallel: int, rank: int, first_file: int = 0
) -> ImagePlan:
    """Do the same for blocks that have their places in the arena, each on a page."""
    pads: list[BlockSpec] = []
    pad_places: list[tuple[int, int]] = []
    members_of_files, extents_of_files = [], []
    for members in spread_by_bytes(specs, parallel) if specs else []:
        numbers: list[int] = []
        extents: list[tuple[int, int]] = []
        for number in members:
            size = specs[number].bytes
            missing = 0 if number == members[-1] else paged(size) - size
            numbers.append(number)
            if missing:
                numbers.append(len(specs) + len(pads))
                pads.append(_pad(len(pads), missing))
                pad_places.append((places[number] + size, missing))
            if size:
                extents.append((places[number], size + missing))
        members_of_files.append(numbers)
        extents_of_files.append(tuple(extents))
    every = [*specs, *pads]
    placed, blocks = place_files(every, members_of_files, rank=rank, first_file=first_file)
    return ImagePlan(
        blocks=blocks,
        files=tuple(replace(file, extents=own) for file, own in zip(placed, extents_of_files, strict=True)),
        bytes=0,
        offsets=np.array([*places, *(at for at, _ in pad_places)], dtype=np.int64),
        lengths=_lengths(every),
        pads=tuple(pad_places),
    )


def place_files(
    specs: Sequence[BlockSpec], members_of_files: Sequence[Sequence[int]], *, rank: int, first_file: int
) -> tuple[list[FilePlan], tuple[PlacedBlock, ...]]:
    """Render the header of every file, and put its blocks one after the other; every block is in one file."""
    keys = unique_names(map(key_of, specs))
    placed: dict[int, PlacedBlock] = {}
    files = []
    for index, members in enumerate(members_of_files, first_file):
        header = render_header([(keys[number], specs[number]) for number in members], rank=rank)
        end = len(header.text)
        for number in members:
            placed[number] = PlacedBlock(spec=specs[number], key=keys[number], file_index=index, offset=end)
            end += specs[number].bytes
        name = shard_name(rank=rank, index=index)
        files.append(FilePlan(name=name, header=header, bytes=end, blocks=tuple(members)))
    return files, tuple([placed[number] for number in range(len(specs))])


def split_rows(spec: BlockSpec, *, bytes_max: int | None = None, unit: int = 1) -> list[BlockSpec]:
    """Cut a block over bytes_max (default: BLOCK_BYTES_MAX) into parts of whole rows; a single larger row stays whole.

    All parts but the last have a multiple of `unit` rows.
    """
    bytes_max = BLOCK_BYTES_MAX if bytes_max is None else bytes_max
    if spec.bytes <= bytes_max or not spec.shape or spec.shape[0] < 2:
        return [spec]
    return parts_of(spec, max(1, bytes_max // (spec.bytes // spec.shape[0] * unit)) * unit)


def parts_of(spec: BlockSpec, rows: int) -> list[BlockSpec]:
    """Return a block in parts of `rows` rows, the last one of fewer."""
    count = spec.shape[0]
    return [spec.part(begin, min(begin + rows, count)) for begin in range(0, count, rows)]


def rows_on_pages(row_bytes: int) -> int:
    """Return the least number of rows that are whole pages."""
    return PAGE_BYTES // math.gcd(PAGE_BYTES, row_bytes)


def key_of(spec: BlockSpec) -> str:
    """Return the safetensors name of a block: its own, with its range of rows, or the ranges of its box, if a part."""
    if not spec.is_part:
        return spec.name
    ranges = [f"{begin}:{begin + size}" for begin, size in zip(spec.begin, spec.shape, strict=True)]
    return f"{spec.name}[{','.join(ranges if spec.is_box else ranges[:1])}]"


def _lengths(specs: Sequence[BlockSpec]) -> I64:
    return np.fromiter((spec.bytes for spec in specs), dtype=np.int64, count=len(specs))


def _pad(number: int, size: int) -> BlockSpec:
    return array_spec(f"{PAD_NAME}.{number}", torch.uint8, (size,), Role.PAD)


def array_spec(name: str, dtype: torch.dtype, shape: tuple[int, ...], role: Role) -> BlockSpec:
    """Return a block of a whole array, stored as it is. UnsupportedError for the dtype."""
    stored = stored_dtype(dtype, owner=name)
    return BlockSpec(
        name=name,
        role=role,
        dtype=stored.name,
        stored_dtype=stored.stored,
        stored_itemsize=stored.stored_itemsize,
        shape=shape,
        stored_shape=stored.stored_shape(shape),
    )
