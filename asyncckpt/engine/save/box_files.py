"""Write tensors, or boxes of them, that somebody else has planned: no state to take apart, no tables, no filters.

    plan_boxes     gives every box its place in this rank's shard files, and renders what the manifest says of it
    write_boxes    copies all of them into an arena, by one native copy and one launch for each device, and drains it;
                   where none is to be had, they are streamed through chunk buffers. What was staged in place already
                   (staged_tensors.py) is drained from there

A plan is good for every save of boxes of the same names, dtypes and places.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.devices.current_runtime import check_not_capturing, device_of
from asyncckpt.devices.fetch import wait_for
from asyncckpt.devices.host_copies import Pending
from asyncckpt.engine.process.background import writers
from asyncckpt.engine.save.staged_tensors import LentArena, copy_pieces, free_arena, lent_arena, remember_places
from asyncckpt.errors import UsageError
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.head import FileFacts
from asyncckpt.format.tree import Node
from asyncckpt.format.write_manifest import BodyTemplate, render_body
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.source import ByteSource
from asyncckpt.native import U8, U64
from asyncckpt.plan.dense_blocks import BY_TORCH, CopyWays, TensorPieces
from asyncckpt.plan.image import ImagePlan, plan_image, split_rows
from asyncckpt.plan.leaf_memory import check_leaf
from asyncckpt.plan.state import still
from asyncckpt.shard.files import ShardTarget, drain_images
from asyncckpt.shard.stream import stream_sources
from asyncckpt.snapshot.block_data import tensor_source
from asyncckpt.snapshot.capture import look
from asyncckpt.staging.chunks import chunk_buffers
from asyncckpt.staging.pool import Arena, pool

# Files, and digests of their blocks, as native.row_begins says.
Written = tuple[tuple[FileFacts, ...], U8]

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class BoxPlan:
    """Boxes in the order given, and the blocks that they are written as: more than one for a box over the limit.

    pieces: of every block, which bytes of its box it is, and its place in the image.
    """

    boxes: tuple[BlockSpec, ...]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    pieces: TensorPieces
    image: ImagePlan
    body: BodyTemplate

    def name_of(self, box: int) -> str:
        return self.boxes[box].name


def plan_boxes(boxes: Sequence[BlockSpec], tree: Node, *, parallel: int, rank: int) -> BoxPlan:
    """Place the boxes of one rank; `leaf` of a box counts within the tree."""
    parts = [(part, box, number) for number, box in enumerate(boxes) for part in split_rows(box)]
    image = plan_image([part for part, _, _ in parts], parallel=parallel, rank=rank)
    return BoxPlan(
        boxes=tuple(boxes),
        dtypes=[dtype_by_name(box.dtype, owner=box.name).dtype for box in boxes],
        shapes=[torch.Size(box.shape) for box in boxes],
        pieces=TensorPieces.of(parts, place=image.offsets, bytes=image.lengths),
        image=image,
        body=render_body((), tree, image.blocks),
    )


def write_boxes(plan: BoxPlan, tensors: Sequence[torch.Tensor], target: ShardTarget) -> Written:
    """Write the shard files; tensors are those of the boxes, in their order, on any device and with any strides.

    On the calling thread; returns when the files are synced. What this thread has queued on devices is waited for.
    UsageError, UnsupportedError before a file is made; IOFailedError, DeviceError.
    """
    check_not_capturing("a save")
    tensors, ways = _check(plan, tensors)
    begins, pieces = look(tensors, ways, name=plan.name_of).begins, plan.pieces

    def copy(wanted: TensorPieces, arena: Arena) -> Pending:
        # Beside a trainer one thread: it is as fast as a disk, and all of them would take the trainer's cores.
        threads = 0 if threading.current_thread() is threading.main_thread() else 1
        memory = torch.from_numpy(arena.view())
        return copy_pieces(
            wanted, tensors, ways, plan.name_of, memory=memory, arena=arena, options=target.options, threads=threads
        )

    lent, is_left = _staged_in_place(plan, tensors, begins)
    if lent is not None:
        if is_left.any():
            copy(pieces.only(is_left), lent.arena).settle()
        return _drain(plan, lent.arena, target)
    remember_places(plan.image, pieces, begins, ways.bytes)
    arena = free_arena(plan.image.bytes, limit_bytes=target.options.host_memory_limit)
    if arena is None:
        wait_for(tensors)
        sources = [
            tensor_source(pieces.rows(number, tensors), plan.name_of(tensor))
            for number, tensor in enumerate(pieces.tensor.tolist())
        ]
        return stream_boxes(plan, sources, target)
    try:
        copy(pieces, arena).settle()
        arena.seal()
        return _drain(plan, arena, target)
    finally:
        pool.release(arena)


def _staged_in_place(
    plan: BoxPlan, tensors: Sequence[torch.Tensor], begins: U64
) -> tuple[LentArena | None, NDArray[np.bool_]]:
    """Return the arena in which these tensors were staged for this plan, and which blocks are not in place.

    None when one of those cannot be copied to its place by the host, or another tensor is there.
    """
    pieces = plan.pieces
    lent = lent_arena(begins)
    if lent is None or lent.places.image is not plan.image:
        return None, np.zeros(0, dtype=np.bool_)
    at = begins[pieces.tensor].astype(np.int64) + pieces.source_offset
    is_left = (at != pieces.place + lent.arena.address) & (pieces.bytes > 0)
    taken = np.isin(pieces.place[is_left], lent.places.begins[lent.places.sizes > 0])
    on_devices = any(device_of(tensors[number]) is not None for number in set(pieces.tensor[is_left].tolist()))
    return (None if taken.any() or on_devices else lent), is_left


def _drain(plan: BoxPlan, arena: Arena, target: ShardTarget) -> Written:
    """Write an arena that holds the image. The caller releases it."""
    return drain_images([(plan.image, 0)], arena.view(), target)


def _check(plan: BoxPlan, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], CopyWays]:
    """Return the tensors as ones that nobody else can give another form; errors for those that are not as planned."""
    for tensor, box in zip(tensors, plan.boxes, strict=True):
        if type(tensor) not in _PLAIN_TENSORS:
            check_leaf(tensor, box.name)
    tensors = list(map(still, tensors))
    if [tensor.shape for tensor in tensors] != plan.shapes or [tensor.dtype for tensor in tensors] != plan.dtypes:
        for tensor, box, dtype in zip(tensors, plan.boxes, plan.dtypes, strict=True):
            if tuple(tensor.shape) != box.shape or tensor.dtype is not dtype:
                found, expected = (tuple(tensor.shape), tensor.dtype), (box.shape, dtype)
                raise UsageError(f"tensor {box.name!r} is not what was planned", found=found, expected=expected)
    for tensor, box in zip(tensors, plan.boxes, strict=True):
        if tensor.layout is not torch.strided or tensor.is_meta:
            check_leaf(tensor, box.name)
    ways = CopyWays.of(tensors, device_of)
    for number in np.flatnonzero(ways.way == BY_TORCH).tolist():
        check_leaf(tensors[number], plan.boxes[number].name)
    return tensors, ways


def stream_boxes(plan: BoxPlan, sources: Sequence[ByteSource], target: ShardTarget) -> Written:
    """Write the shard files from a source per block, without an arena."""
    with chunk_buffers.borrow(max(file.bytes for file in plan.image.files)) as buffers:
        return stream_sources(plan.image, sources, target, buffers=buffers, writer=writers)
