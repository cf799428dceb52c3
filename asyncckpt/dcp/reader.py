"""A StorageReader for torch.distributed.checkpoint: any asyncckpt checkpoint, resharded by DCP's planner.

Every rank reads the manifest and opens the files by itself, at once, so that retention takes nothing away while DCP
plans. That all of them read the same checkpoint is checked before any target is touched. Chunks get to their targets as
they do for a Loader: straight into place, or by windows (snapshot/boxes.py). With verify, the leaves
that hold what a rank needs of a chunk are read, for their digests.
"""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as DcpStorageReader
from torch.futures import Future

from asyncckpt.arguments import check_choice
from asyncckpt.commit.chain import read_chain
from asyncckpt.commit.discover import look_again, newest_step
from asyncckpt.commit.root import ReadRoot, open_root
from asyncckpt.dcp.attempt import save_lock_held
from asyncckpt.dcp.planned_data import give_value
from asyncckpt.dcp.stored import Stored, ValueApart, stored_of
from asyncckpt.errors import ConflictError, CorruptError, NotFoundError, UsageError
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.manifest import Chain
from asyncckpt.format.names import check_step
from asyncckpt.format.tree import VALUE, leaf_of, leaves, rebuild
from asyncckpt.format.values import decode_value
from asyncckpt.model.enough_memory import enough_memory
from asyncckpt.native import Progress
from asyncckpt.plan.load_targets import writable_tensor
from asyncckpt.shard.reader import READ_THREADS, ChainReader
from asyncckpt.signals import uninterrupted
from asyncckpt.snapshot.boxes import BoxCopy, BoxScatter
from asyncckpt.snapshot.restore import queue_boxes, uploads_of_load
from asyncckpt.snapshot.windows import Scatter, scatter_all
from asyncckpt.storage.folder import check_place


class StorageReader(DcpStorageReader):
    """Read an asyncckpt checkpoint through dcp.load, written by this package's StorageWriter or a Saver.

        dcp.load(state_dict, storage_reader=asyncckpt.dcp.StorageReader("ckpt"))

    path      the directory
    step      None: the newest
    verify    check the digests of everything that is read; False reads of a resharded tensor only the rows needed

    Dense tensors and plain values, by their dotted names; tables are loaded by asyncckpt.Loader. Raises NotFoundError,
    CorruptError, IncompatibleError, UnsupportedError (newer versions of DCP raise an AssertionError that quotes them).
    Source of the interface: torch.distributed.checkpoint.StorageReader.
    """

    _keeps_values = True

    def __init__(self, path: str | os.PathLike[str], *, step: int | None = None, verify: bool = True) -> None:
        step = check_step(step)
        check_choice("verify", verify, (True, False))
        self._path = check_place(path)
        self._step = step
        self._verify = verify
        self._stored: Stored | None = None
        # The files that were opened with `_stored`, until a read takes them. Two threads may load at once.
        self._files: tuple[Chain, ChainReader, weakref.finalize[[], StorageReader]] | None = None

    @property
    def checkpoint_id(self) -> str:
        """The directory."""
        return str(self._path)

    @classmethod
    @uninterrupted
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it names a checkpoint directory."""
        try:
            open_root(check_place(checkpoint_id)).close()
        except (NotFoundError, UsageError):
            return False
        return True

    @uninterrupted
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read from another directory from now on, if one is named."""
        if checkpoint_id is not None:
            self._path = check_place(checkpoint_id)
        self._stored = None
        self._close()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's view of the checkpoint; see asyncckpt/dcp/stored.py. Its files are open until it is read."""
        return self._read().metadata

    def tables(self) -> list[str]:
        """Return the names of the checkpoint's tables, which DCP does not see."""
        return sorted({table.name for table in self._read_once().chain.newest.tables})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._read_once()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        chain = self._read_once().chain
        plan.storage_data = (chain.step, chain.newest.head.attempt)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        found = {plan.storage_data for plan in plans}
        if len(found) > 1:
            raise ConflictError(
                "ranks have found different checkpoints",
                found=sorted(found),
                expected="the same on all ranks",
                hint="name the step, or load when no process saves; all ranks need the same path",
            )
        return plans

    @uninterrupted
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        stored = self._read_once()
        chain = stored.chain
        tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        is_alone = save_lock_held("load", self._path, chain.step)
        says = enough_memory(f"step {chain.step} of {str(self._path)!r}")
        with self._take_files(chain) as reader, is_alone, says:
            read_tensors(reader, tensors, planner, stored)
            for item in plan.items:
                if item.type is LoadItemType.BYTE_IO:
                    name = item.storage_index.fqn
                    owner = f"value {name!r} of step {chain.step}"
                    apart = stored.apart.get(name)
                    if apart is None:
                        value = decode_value(stored.values[name], owner=owner)
                    else:
                        value = _put_together(*apart, reader, stored, owner=owner)
                    give_value(planner, item, value)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @uninterrupted
    def _read(self) -> Stored:
        """Read the manifests and open the files. A damaged file is reported where it is read: what is raised here,
        newer versions of DCP raise as another error."""
        self._close()
        found: list[Chain] = []
        with open_root(self._path) as root:

            def look() -> ChainReader:
                found.clear()
                found.append(read_chain(root, newest_step(root) if self._step is None else self._step))
                return self._open_files(root, found[0])

            try:
                reader = look_again(root, look)
                self._files = found[0], reader, weakref.finalize(self, uninterrupted(reader.close))
            except (NotFoundError, CorruptError):
                if not found:
                    raise
        self._stored = stored = stored_of(found[0], keeps_values=self._keeps_values)
        stored.metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id)
        return stored

    def _take_files(self, chain: Chain) -> ChainReader:
        """Return the open files, which nobody but the caller closes now; reopened for another read."""
        files = self._files
        if files is not None and files[0] is chain and files[2].detach() is not None:
            self._files = None
            return files[1]
        with open_root(self._path) as root:
            return self._open_files(root, chain)

    def _open_files(self, root: ReadRoot, chain: Chain) -> ChainReader:
        return ChainReader(root.data, chain, threads=READ_THREADS, verify=self._verify, progress=Progress())

    def _close(self) -> None:
        files, self._files = self._files, None
        if files is not None:
            files[2]()

    def _read_once(self) -> Stored:
        return self._stored or self._read()


def _put_together(
    value: ValueApart, inner: Mapping[str, TensorStorageMetadata], reader: ChainReader, stored: Stored, *, owner: str
) -> Any:
    """Return a value that holds tensors or arrays."""
    by_block: dict[int, list[BoxCopy]] = {}
    made = []
    for name, item in inner.items():
        made.append(torch.empty(item.size, dtype=item.properties.dtype, device="cpu"))
        for chunk in item.chunks:
            box = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            target = BoxCopy((0,) * len(box), made[-1][box])
            by_block.setdefault(stored.blocks[MetadataIndex(name, chunk.offsets)], []).append(target)
    _read_boxes(by_block, reader)
    kinds = [leaf for _, leaf in leaves(value.node) if leaf is not VALUE]
    found = [leaf_of(kind, tensor) for kind, tensor in zip(kinds, made, strict=True)]
    return rebuild(value.node, iter(found), (decode_value(each, owner=owner) for each in value.values))


def read_tensors(reader: ChainReader, items: Sequence[ReadItem], planner: LoadPlanner, stored: Stored) -> None:
    """Fill the targets of all items; each block that they need is read once."""
    targets = [writable_tensor(item.dest_index.fqn, planner.resolve_tensor(item)) for item in items]
    by_block: dict[int, list[BoxCopy]] = defaultdict(list)
    for item, target in zip(items, targets, strict=True):
        if target.shape != item.lengths:
            raise UsageError(
                f"the planner gives a wrong target for {item.dest_index.fqn!r}",
                found=tuple(target.shape),
                expected=tuple(item.lengths),
            )
        by_block[stored.blocks[item.storage_index]].append(BoxCopy(tuple(item.storage_offsets), target))
    _read_boxes(by_block, reader)
    for item, target in zip(items, targets, strict=True):
        planner.commit_tensor(item, target)


def _read_boxes(by_block: Mapping[int, list[BoxCopy]], reader: ChainReader) -> None:
    scatters: list[Scatter] = []
    with uploads_of_load() as uploads:
        for number, copies in by_block.items():
            spec = reader.block(number).placed.spec
            dtype = dtype_by_name(spec.dtype, owner=spec.name).dtype
            if all(copy.target.dtype is dtype for copy in copies):
                scatters += queue_boxes(number, copies, reader, uploads)
            else:
                scatters.append(BoxScatter(number, tuple(copies)))
        reader.run()
        scatter_all(scatters, reader, uploads)
