"""Give every block its place: which shard file, at which offset, and where in the arena.

An arena holds the image of all shard files of a save, one behind the other, each starting on a page. In a file, arrays
are ordered by element size (largest first), so that every array starts aligned although safetensors allows no gaps.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from asyncckpt.format.header import HeaderTemplate, render_header
from asyncckpt.format.names import shard_name
from asyncckpt.model.block import BlockSpec, PlacedBlock
from asyncckpt.native import PAGE_BYTES
from asyncckpt.options import BLOCK_BYTES_MAX, FILE_TARGET_BYTES
from asyncckpt.plan.leaf_names import unique_names


@dataclass(frozen=True)
class FilePlan:
    """One shard file: `base` is its place in the arena image, `blocks` the numbers of its blocks in file order."""

    name: str
    header: HeaderTemplate
    bytes: int
    base: int
    blocks: tuple[int, ...]

    @property
    def header_bytes(self) -> int:
        return len(self.header.text)


@dataclass(frozen=True)
class ImagePlan:
    """All shard files of one rank. `offsets` and `lengths` place every block in the arena, int64 [blocks]."""

    blocks: tuple[PlacedBlock, ...]
    files: tuple[FilePlan, ...]
    bytes: int
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @property
    def payload_bytes(self) -> int:
        return int(self.lengths.sum())


def plan_image(
    specs: Sequence[BlockSpec], *, parallel: int, rank: int, needs_file: bool = True, files_count: int = 0
) -> ImagePlan:
    """Spread blocks over at most `parallel` files by bytes.

    needs_file: without blocks there is a file all the same. files_count: at least so many files, be they empty.
    """
    keys = unique_names(key_of(spec) for spec in specs)
    placed: list[PlacedBlock | None] = [None] * len(specs)
    offsets = np.zeros(len(specs), dtype=np.int64)
    files: list[FilePlan] = []
    base = 0
    members_of_files = spread(specs, parallel) if specs or needs_file else []
    members_of_files += [[]] * (files_count - len(members_of_files))
    for index, members in enumerate(members_of_files):
        members = sorted(members, key=lambda number: (-specs[number].alignment, number))
        header = render_header([(keys[number], specs[number]) for number in members], rank=rank)
        end = len(header.text)
        for number in members:
            placed[number] = PlacedBlock(spec=specs[number], key=keys[number], file_index=index, offset=end)
            offsets[number] = base + end
            end += specs[number].bytes
        name = shard_name(rank=rank, index=index)
        files.append(FilePlan(name=name, header=header, bytes=end, base=base, blocks=tuple(members)))
        base += -(-end // PAGE_BYTES) * PAGE_BYTES
    lengths = np.fromiter((spec.bytes for spec in specs), dtype=np.int64, count=len(specs))
    blocks = tuple(block for block in placed if block is not None)
    assert len(blocks) == len(specs)
    return ImagePlan(blocks=blocks, files=tuple(files), bytes=base, offsets=offsets, lengths=lengths)


def split_rows(spec: BlockSpec) -> list[BlockSpec]:
    """Cut a block over BLOCK_BYTES_MAX into parts of whole rows; a single larger row stays whole."""
    if spec.bytes <= BLOCK_BYTES_MAX or not spec.shape or spec.shape[0] < 2:
        return [spec]
    row_bytes = spec.bytes // spec.shape[0]
    step = max(1, BLOCK_BYTES_MAX // row_bytes)
    parts = []
    for begin in range(0, spec.shape[0], step):
        count = min(step, spec.shape[0] - begin)
        shape, stored = (count, *spec.shape[1:]), (count, *spec.stored_shape[1:])
        whole = spec.whole_shape or spec.shape
        parts.append(
            replace(spec, shape=shape, stored_shape=stored, row_begin=spec.row_begin + begin, whole_shape=whole)
        )
    return parts


def key_of(spec: BlockSpec) -> str:
    """The safetensors name of a block: its own, with the range of rows, or all ranges of a box, when it is a part."""
    if not spec.is_part:
        return spec.name
    ranges = [f"{begin}:{begin + size}" for begin, size in zip(spec.begin, spec.shape, strict=True)]
    return f"{spec.name}[{','.join(ranges if spec.is_box else ranges[:1])}]"


def spread(specs: Sequence[BlockSpec], parallel: int) -> list[list[int]]:
    """Numbers of the blocks of each file: at least one file, at most one per FILE_TARGET_BYTES.

    The largest block goes first, into the emptiest file.
    """
    total = sum(spec.bytes for spec in specs)
    count = max(1, min(parallel, len(specs), -(-total // FILE_TARGET_BYTES)))
    if count == 1:
        return [list(range(len(specs)))]
    members: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, index) for index in range(count)]
    for number in sorted(range(len(specs)), key=lambda n: (-specs[n].bytes, n)):
        load, index = heapq.heappop(loads)
        members[index].append(number)
        heapq.heappush(loads, (load + specs[number].bytes, index))
    return [numbers for numbers in members if numbers]
