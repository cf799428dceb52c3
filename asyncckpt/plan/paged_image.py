"""Shard files whose arrays all begin on a page, so that they can be written straight from regions that lie apart.

safetensors allows no holes, so the rest of an array's last page is an array of its own, a pad: zeros, role "pad".

    header | column | pad | column | pad | ... | last column
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from asyncckpt.format.header import HeaderTemplate, render_header
from asyncckpt.format.names import shard_name
from asyncckpt.model.block import BlockSpec, PlacedBlock
from asyncckpt.model.table import Role
from asyncckpt.native import PAGE_BYTES
from asyncckpt.options import BLOCK_BYTES_MAX
from asyncckpt.plan.image import key_of, spread
from asyncckpt.plan.leaf_names import unique_names

PAD_NAME = "#pad"


@dataclass(frozen=True)
class PagedFile:
    """One shard file; `blocks` are the numbers of its blocks, pads included, in file order."""

    name: str
    header: HeaderTemplate
    bytes: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class PagedImage:
    """The files, and all blocks: those that were asked for in their order, then the pads."""

    files: tuple[PagedFile, ...]
    blocks: tuple[PlacedBlock, ...]


def plan_paged_image(specs: Sequence[BlockSpec], *, parallel: int, rank: int, first_file: int) -> PagedImage:
    """Spread blocks over at most `parallel` files; numbers of files count on from first_file."""
    files_members = []
    pads: list[BlockSpec] = []
    for members in spread(specs, parallel) if specs else []:
        ordered = sorted(members, key=lambda number: (-specs[number].stored_itemsize, number))
        with_pads: list[int] = []
        for position, number in enumerate(ordered):
            with_pads.append(number)
            missing = -specs[number].bytes % PAGE_BYTES
            if missing and position + 1 < len(ordered):
                with_pads.append(len(specs) + len(pads))
                pads.append(_pad(len(pads), missing))
        files_members.append(with_pads)
    every = [*specs, *pads]
    keys = unique_names(key_of(spec) for spec in every)
    placed: list[PlacedBlock | None] = [None] * len(every)
    files = []
    for index, numbers in enumerate(files_members):
        header = render_header([(keys[number], every[number]) for number in numbers], rank=rank)
        end = len(header.text)
        for number in numbers:
            placed[number] = PlacedBlock(every[number], key=keys[number], file_index=first_file + index, offset=end)
            end += every[number].bytes
        name = shard_name(rank=rank, index=first_file + index)
        files.append(PagedFile(name=name, header=header, bytes=end, blocks=tuple(numbers)))
    blocks = tuple(block for block in placed if block is not None)
    assert len(blocks) == len(every)
    return PagedImage(files=tuple(files), blocks=blocks)


def split_pages(spec: BlockSpec, *, row_bytes: int) -> list[BlockSpec]:
    """Cut a column over BLOCK_BYTES_MAX into parts of whole rows, all but the last of which are whole pages."""
    if spec.bytes <= BLOCK_BYTES_MAX:
        return [spec]
    unit = PAGE_BYTES // math.gcd(PAGE_BYTES, row_bytes)
    step = max(1, BLOCK_BYTES_MAX // (row_bytes * unit)) * unit
    parts = []
    for begin in range(0, spec.shape[0], step):
        count = min(step, spec.shape[0] - begin)
        shape, stored = (count, *spec.shape[1:]), (count, *spec.stored_shape[1:])
        parts.append(replace(spec, shape=shape, stored_shape=stored, row_begin=begin, whole_shape=spec.shape))
    return parts if len(parts) > 1 else [spec]


def _pad(number: int, size: int) -> BlockSpec:
    return BlockSpec(
        name=f"{PAD_NAME}.{number}",
        role=Role.PAD,
        dtype="uint8",
        stored_dtype="U8",
        stored_itemsize=1,
        shape=(size,),
        stored_shape=(size,),
    )
