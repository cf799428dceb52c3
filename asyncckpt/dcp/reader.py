"""A StorageReader for torch.distributed.checkpoint: any asyncckpt checkpoint, resharded by DCP's planner.

Every rank reads the manifest and opens the files by itself; that all of them read the same checkpoint is checked before
any target is touched. A chunk that a target takes as it is lands in the target at once; others go through a window.
With verify, every chunk that a rank needs anything of is read whole, for only a whole one has a digest to check.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as DcpStorageReader
from torch.futures import Future

from asyncckpt.arguments import check_choice
from asyncckpt.commit.chain import read_chain
from asyncckpt.commit.discover import newest_step
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.dcp.attempt import save_lock_held
from asyncckpt.dcp.planned_data import give_value
from asyncckpt.dcp.stored import Stored, stored_of
from asyncckpt.devices.current_runtime import device_of
from asyncckpt.errors import ConflictError, NotFoundError, UsageError
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.encodings import decode
from asyncckpt.format.limits import check_step
from asyncckpt.format.manifest import Chain
from asyncckpt.format.values import decode_value
from asyncckpt.model.block import BlockSpec
from asyncckpt.native import Progress
from asyncckpt.shard.reader import ChainReader
from asyncckpt.storage.directory import check_path

READ_THREADS = 4
WINDOW_BYTES = 64 << 20


class StorageReader(DcpStorageReader):
    """Read an asyncckpt checkpoint through dcp.load, whoever wrote it: this package's StorageWriter or a Saver.

        dcp.load(state_dict, storage_reader=asyncckpt.dcp.StorageReader("ckpt"))

    path      the directory
    step      None: the newest
    verify    check the digest of everything that is read; False reads of a resharded tensor only the rows needed

    Dense tensors and plain values, by their dotted names; tables are loaded by asyncckpt.Loader. Raises NotFoundError,
    CorruptError, IncompatibleError, UnsupportedError (newer versions of DCP raise an AssertionError that quotes them).
    Source of the interface: torch.distributed.checkpoint.StorageReader.
    """

    def __init__(self, path: str | os.PathLike[str], *, step: int | None = None, verify: bool = True) -> None:
        check_step(step)
        check_choice("verify", verify, (True, False))
        self._path = check_path(path)
        self._step = step
        self._verify = verify
        self._chain: Chain | None = None
        self._stored: Stored | None = None

    @property
    def checkpoint_id(self) -> str:
        """The directory."""
        return str(self._path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it names a checkpoint directory."""
        try:
            CheckpointRoot.for_reading(check_path(checkpoint_id)).close()
        except (NotFoundError, UsageError):
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read from another directory from now on, if one is named."""
        if checkpoint_id is not None:
            self._path = check_path(checkpoint_id)
        self._chain = self._stored = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's view of the checkpoint; see asyncckpt/dcp/stored.py."""
        with CheckpointRoot.for_reading(self._path) as root:
            self._chain = read_chain(root, newest_step(root) if self._step is None else self._step)
        self._stored = stored_of(self._chain)
        self._stored.metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id)
        return self._stored.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._stored is None:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        chain, _ = self._opened()
        plan.storage_data = (chain.step, chain.newest.head.attempt)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        found = {plan.storage_data for plan in plans}
        if len(found) > 1:
            raise ConflictError(
                "ranks have found different checkpoints",
                found=sorted(found),
                expected="the same on all ranks",
                hint="name the step, or load when nobody saves; all ranks need the same path",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        chain, stored = self._opened()
        with save_lock_held("load", self._path, chain.step), CheckpointRoot.for_reading(self._path) as root:
            progress = Progress()
            with ChainReader(root.data, chain, threads=READ_THREADS, verify=self._verify, progress=progress) as reader:
                tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
                read_tensors(reader, tensors, planner, stored)
            for item in plan.items:
                if item.type is LoadItemType.BYTE_IO:
                    name = item.storage_index.fqn
                    owner = f"value {name!r} of step {chain.step}"
                    give_value(planner, item, decode_value(stored.values[name], owner=owner))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _opened(self) -> tuple[Chain, Stored]:
        if self._chain is None or self._stored is None:
            self.read_metadata()
        assert self._chain is not None
        assert self._stored is not None
        return self._chain, self._stored


def read_tensors(reader: ChainReader, items: Sequence[ReadItem], planner: LoadPlanner, stored: Stored) -> None:
    """Fill the targets of all items; each block that they need is read once."""
    by_block: dict[int, list[ReadItem]] = defaultdict(list)
    for item in items:
        by_block[stored.blocks[item.storage_index]].append(item)
    straight: list[tuple[ReadItem, torch.Tensor]] = []
    others: list[tuple[int, list[tuple[ReadItem, torch.Tensor]]]] = []
    for number, wanted in by_block.items():
        targets = [(item, planner.resolve_tensor(item).detach()) for item in wanted]
        spec = reader.block(number).placed.spec
        if len(targets) == 1 and _fits(targets[0][1], spec):
            reader.add(number, targets[0][1].data_ptr(), begin=0, bytes=spec.bytes)
            straight += targets
        else:
            others.append((number, targets))
    reader.run()
    for item, target in straight:
        planner.commit_tensor(item, target)
    for batch in _batches(others, reader):
        _read_batch(batch, reader, planner)


def _fits(target: torch.Tensor, spec: BlockSpec) -> bool:
    """Return whether a block's bytes are those of the target."""
    on_host = target.is_cpu and device_of(target) is None
    plain = on_host and target.is_contiguous() and not target.is_conj() and not target.is_neg()
    dtype = dtype_by_name(spec.dtype, owner=spec.name).dtype
    return plain and not spec.encoding and target.dtype is dtype and tuple(target.shape) == spec.shape


_Wanted = tuple[int, list[tuple[ReadItem, torch.Tensor]]]


def _batches(wanted: Sequence[_Wanted], reader: ChainReader) -> Iterator[list[_Wanted]]:
    """Yield as many blocks as fit the window, or a single larger one."""
    batch: list[_Wanted] = []
    used = 0
    for number, targets in wanted:
        size = reader.block(number).placed.spec.bytes
        if batch and used + size > WINDOW_BYTES:
            yield batch
            batch, used = [], 0
        batch.append((number, targets))
        used += size
    if batch:
        yield batch


def _read_batch(batch: Sequence[_Wanted], reader: ChainReader, planner: LoadPlanner) -> None:
    windows = []
    for number, targets in batch:
        spec = reader.block(number).placed.spec
        low, high = _rows_needed(spec, targets, whole=reader.verify)
        row_bytes = spec.bytes // spec.shape[0] if high > low and not spec.encoding else 0
        begin, size = (0, spec.bytes) if (low, high) == (0, -1) else (low * row_bytes, (high - low) * row_bytes)
        memory = np.empty(size, dtype=np.uint8)
        reader.add(number, memory.ctypes.data, begin=begin, bytes=size)
        windows.append((spec, memory, low))
    reader.run()
    for (_, targets), (spec, memory, low) in zip(batch, windows, strict=True):
        values = _values(spec, memory)
        for item, target in targets:
            first = (item.storage_offsets[0] - low, *item.storage_offsets[1:]) if spec.shape else ()
            piece = values[tuple(slice(b, b + n) for b, n in zip(first, item.lengths, strict=True))]
            target.copy_(piece)
            planner.commit_tensor(item, target)


def _rows_needed(spec: BlockSpec, targets: Sequence[tuple[ReadItem, torch.Tensor]], *, whole: bool) -> tuple[int, int]:
    """Return the rows [low, high) of the block that contain the items; (0, -1) for all of it."""
    if whole or spec.encoding or not spec.shape or not spec.bytes:
        return 0, -1
    low = min(item.storage_offsets[0] for item, _ in targets)
    high = max(item.storage_offsets[0] + item.lengths[0] for item, _ in targets)
    return low, high


def _values(spec: BlockSpec, memory: np.ndarray[Any, np.dtype[np.uint8]]) -> torch.Tensor:
    """Return the block, or whole rows of it, as the array that was saved."""
    if spec.encoding:
        return decode(memory, spec)
    dtype = dtype_by_name(spec.dtype, owner=spec.name).dtype
    if not memory.size:
        return torch.empty(spec.shape, dtype=dtype)
    if not spec.shape:
        return torch.from_numpy(memory).view(dtype).reshape(())
    elements = memory.size // dtype.itemsize
    return torch.from_numpy(memory).view(dtype).reshape(elements // math.prod(spec.shape[1:]), *spec.shape[1:])
