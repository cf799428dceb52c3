"""Write tensors, or boxes of them, that somebody else has planned: no state to take apart, no tables, no filters.

    plan_boxes     gives every box its place in this rank's shard files, and renders what the manifest says of it
    write_boxes    copies all of them into an arena, by one native copy and one launch for each device, and drains it;
                   where none is to be had, they are streamed through chunk buffers

A plan is good for every save of boxes of the same names, dtypes and places.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.devices.caller_streams import check_not_capturing
from asyncckpt.devices.chosen import device_of, runtime
from asyncckpt.devices.fetch import wait_for
from asyncckpt.engine.background import writers
from asyncckpt.engine.device_stage import host_copies, launch
from asyncckpt.errors import DeadlineError, DeviceError, UsageError
from asyncckpt.format.dtypes import dtype_by_name, stored_dtype
from asyncckpt.format.manifest import BodyTemplate, FileFacts, render_body
from asyncckpt.format.names import Attempt
from asyncckpt.format.tree import Node
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.source import ByteSource
from asyncckpt.model.table import Role
from asyncckpt.native import Progress, core
from asyncckpt.options import CHUNK_BYTES, SaveOptions
from asyncckpt.plan.image import ImagePlan, plan_image, split_rows
from asyncckpt.plan.leaf_facts import addresses, check_leaf, shrunk_storages
from asyncckpt.plan.region_files import RegionFiles
from asyncckpt.shard.drain import ArenaImage, drain_image
from asyncckpt.shard.stream import stream_sources
from asyncckpt.snapshot.capture import as_tensor
from asyncckpt.snapshot.source import tensor_source
from asyncckpt.staging.arena import Arena
from asyncckpt.staging.chunks import chunk_buffers
from asyncckpt.staging.pool import pool
from asyncckpt.storage.directory import Directory

I64 = NDArray[np.int64]
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_kind = attrgetter("dtype", "is_cpu")
_NO_REGIONS = RegionFiles(
    files=(), blocks=(), offsets=np.zeros(0, dtype=np.int64), lengths=np.zeros(0, dtype=np.int64), pads=()
)


@dataclass(frozen=True)
class BoxPlan:
    """Boxes in the order given, and the blocks that they are written as: more than one for a box over the limit.

    tensor, first_row: of every block, the number of its box and where in it the block begins, int64 [blocks].
    """

    boxes: tuple[BlockSpec, ...]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    tensor: I64
    first_row: I64
    image: ImagePlan
    body: BodyTemplate


@dataclass(frozen=True)
class WrittenBoxes:
    """Shard files on disk; digests of the blocks, uint8 [blocks, 16]."""

    files: tuple[FileFacts, ...]
    digests: NDArray[np.uint8]


def box_spec(
    name: str,
    dtype: torch.dtype,
    *,
    begin: Sequence[int],
    shape: Sequence[int],
    whole_shape: Sequence[int],
    leaf: int | None,
) -> BlockSpec:
    """The block of one box; of a box that is the whole tensor, a plain block. UnsupportedError for the dtype."""
    stored = stored_dtype(dtype, owner=name)
    size, whole = tuple(shape), tuple(whole_shape)
    is_part = size != whole
    columns = tuple(begin[1:]) if is_part else ()
    return BlockSpec(
        name=name,
        role=Role.DENSE,
        dtype=stored.name,
        stored_dtype=stored.stored,
        stored_itemsize=stored.stored_itemsize,
        shape=size,
        stored_shape=stored.stored_shape(size),
        leaf=leaf,
        row_begin=begin[0] if is_part else 0,
        whole_shape=whole if is_part else None,
        column_begins=columns if any(columns) else (),
    )


def plan_boxes(boxes: Sequence[BlockSpec], tree: Node, *, parallel: int, rank: int) -> BoxPlan:
    """Place the boxes of one rank; `leaf` of a box counts within the tree."""
    specs, tensor, first_row = [], [], []
    for number, box in enumerate(boxes):
        for spec in split_rows(box):
            specs.append(spec)
            tensor.append(number)
            first_row.append(spec.row_begin - box.row_begin)
    return BoxPlan(
        boxes=tuple(boxes),
        dtypes=[dtype_by_name(box.dtype, owner=box.name).dtype for box in boxes],
        shapes=[torch.Size(box.shape) for box in boxes],
        tensor=np.array(tensor, dtype=np.int64),
        first_row=np.array(first_row, dtype=np.int64),
        image=(image := plan_image(specs, parallel=parallel, rank=rank)),
        body=render_body((), tree, image.blocks),
    )


def write_boxes(
    plan: BoxPlan,
    tensors: Sequence[torch.Tensor],
    *,
    folder: Directory,
    attempt: Attempt,
    options: SaveOptions,
    progress: Progress,
) -> WrittenBoxes:
    """Write the shard files; tensors are those of the boxes, in their order, on any device and with any strides.

    On the calling thread; returns when the files are synced. What this thread has queued on devices is waited for.
    UsageError, UnsupportedError before a file is made; IOFailedError, DeviceError.
    """
    check_not_capturing("a save")
    raw = _check(plan, tensors)
    arena = _arena(plan.image.bytes, options)
    if arena is None:
        wait_for(tensors)
        return _stream(plan, tensors, folder=folder, attempt=attempt, options=options, progress=progress)
    try:
        copy_boxes(plan, tensors, raw, arena, base=0, options=options)
    except (DeviceError, DeadlineError):
        pool.discard(arena)
        raise
    except BaseException:
        pool.release(arena)
        raise
    try:
        arena.seal()
        return drain_boxes(plan, arena, base=0, folder=folder, attempt=attempt, options=options, progress=progress)
    finally:
        pool.release(arena)


def drain_boxes(
    plan: BoxPlan,
    arena: Arena,
    *,
    base: int,
    folder: Directory,
    attempt: Attempt,
    options: SaveOptions,
    progress: Progress,
) -> WrittenBoxes:
    """Write an arena that holds the image from `base` on. The caller releases it."""
    image = ArenaImage(plan=plan.image, base=base, regions=_NO_REGIONS, address=arena.address, raw=arena.view())
    files, digests = drain_image(image, folder=folder, attempt=attempt, options=options, progress=progress)
    return WrittenBoxes(files=files, digests=digests)


def copy_boxes(
    plan: BoxPlan,
    tensors: Sequence[torch.Tensor],
    raw: NDArray[np.bool_],
    arena: Arena,
    *,
    base: int,
    options: SaveOptions,
) -> None:
    """Copy all boxes to their places: those with an address (`raw`) at once, the others by torch. Waits for devices."""
    image, view = plan.image, arena.view()
    begins = np.zeros(len(tensors), dtype=np.uint64)
    begins[raw] = addresses([tensor for tensor, is_raw in zip(tensors, raw.tolist(), strict=True) if is_raw])
    blocks = np.flatnonzero(raw[plan.tensor])
    row_bytes = np.array([0 if not box.shape or not box.shape[0] else box.bytes // box.shape[0] for box in plan.boxes])
    offsets = plan.first_row[blocks] * row_bytes[plan.tensor[blocks]] if len(blocks) else np.zeros(0, dtype=np.int64)
    segments = np.empty((len(blocks), 3), dtype=np.uint64)
    segments[:, 0] = begins[plan.tensor[blocks]] + offsets.astype(np.uint64)
    segments[:, 1] = image.offsets[blocks].astype(np.uint64) + np.uint64(arena.address + base)
    segments[:, 2] = image.lengths[blocks].astype(np.uint64)
    copies = host_copies(options)
    devices = _devices(tensors)[plan.tensor[blocks]]
    for device in set(devices[devices >= 0].tolist()):
        copies.on(device).add(segments[devices == device], tensors)
    for number in np.flatnonzero(~raw[plan.tensor]).tolist():
        at, spec = base + int(image.offsets[number]), image.blocks[number].spec
        copies.put(as_tensor(view[at : at + spec.bytes], spec), _rows(plan, tensors, number))
    pending = launch(copies, arena, options)
    try:
        # Beside a trainer one thread: it is as fast as a disk, and all of them would take the trainer's cores.
        threads = 0 if threading.current_thread() is threading.main_thread() else 1
        core.copy(np.ascontiguousarray(segments[devices < 0]), threads=threads)
    finally:
        pending.settle()


def _devices(tensors: Sequence[torch.Tensor]) -> I64:
    """The device of every tensor, int64 [tensors]; -1: the host."""
    if runtime() is None:
        return np.full(len(tensors), -1, dtype=np.int64)
    devices = [device_of(tensor) for tensor in tensors]
    return np.array([-1 if device is None else device for device in devices], dtype=np.int64)


def _check(plan: BoxPlan, tensors: Sequence[torch.Tensor]) -> NDArray[np.bool_]:
    """Which tensors can be copied by their addresses; errors for those that are not what was planned."""
    for tensor, box in zip(tensors, plan.boxes, strict=True):
        if type(tensor) not in _PLAIN_TENSORS:
            check_leaf(tensor, box.name)
    kinds = list(map(_kind, tensors))
    shapes = [tensor.shape for tensor in tensors]
    if shapes != plan.shapes or [dtype for dtype, _ in kinds] != plan.dtypes:
        for tensor, box, dtype in zip(tensors, plan.boxes, plan.dtypes, strict=True):
            if tuple(tensor.shape) != box.shape or tensor.dtype is not dtype:
                found, expected = (tuple(tensor.shape), tensor.dtype), (box.shape, dtype)
                raise UsageError(f"tensor {box.name!r} is not what was planned", found=found, expected=expected)
    for tensor, box in zip(tensors, plan.boxes, strict=True):
        if tensor.layout is not torch.strided or tensor.is_meta:
            check_leaf(tensor, box.name)
    raw = np.array(
        [
            (is_cpu or device_of(tensor) is not None)
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not (dtype.is_complex and tensor.is_conj())
            for tensor, (dtype, is_cpu) in zip(tensors, kinds, strict=True)
        ],
        dtype=np.bool_,
    )
    held = [tensor for tensor, is_raw in zip(tensors, raw.tolist(), strict=True) if is_raw]
    sizes = np.array([box.bytes for box in plan.boxes], dtype=np.int64)[raw]
    itemsizes = np.array([dtype.itemsize for dtype, _ in kinds], dtype=np.int64)[raw]
    suspects = set(np.flatnonzero(raw)[shrunk_storages(held, bytes=sizes, itemsizes=itemsizes)].tolist())
    for number in [*suspects, *np.flatnonzero(~raw).tolist()]:
        check_leaf(tensors[number], plan.boxes[number].name)
    return raw


def _arena(bytes: int, options: SaveOptions) -> Arena | None:
    """An arena, if there is one to be had at once: whoever holds the others may hold them for long."""
    if not pool.fits(bytes, limit_bytes=options.host_memory_limit):
        return None
    try:
        return pool.acquire(bytes, deadline_s=0, limit_bytes=options.host_memory_limit)
    except DeadlineError:
        return None


def _rows(plan: BoxPlan, tensors: Sequence[torch.Tensor], number: int) -> torch.Tensor:
    """The rows of a block."""
    tensor: torch.Tensor = tensors[int(plan.tensor[number])].detach()
    spec = plan.image.blocks[number].spec
    if spec.shape == tuple(tensor.shape):
        return tensor
    first = int(plan.first_row[number])
    return tensor[first : first + spec.shape[0]]


def _stream(
    plan: BoxPlan,
    tensors: Sequence[torch.Tensor],
    *,
    folder: Directory,
    attempt: Attempt,
    options: SaveOptions,
    progress: Progress,
) -> WrittenBoxes:
    sources = [tensor_source(_rows(plan, tensors, number)) for number in range(len(plan.image.blocks))]
    return stream_boxes(plan, sources, folder=folder, attempt=attempt, options=options, progress=progress)


def stream_boxes(
    plan: BoxPlan,
    sources: Sequence[ByteSource],
    *,
    folder: Directory,
    attempt: Attempt,
    options: SaveOptions,
    progress: Progress,
) -> WrittenBoxes:
    """Write the shard files from a source per block, without an arena."""
    largest = min(CHUNK_BYTES, max(file.bytes for file in plan.image.files))
    with chunk_buffers.borrow(largest) as buffers:
        files, digests = stream_sources(
            plan.image,
            sources,
            buffers=buffers,
            writer=writers,
            folder=folder,
            attempt=attempt,
            options=options,
            progress=progress,
        )
    return WrittenBoxes(files=files, digests=digests)
