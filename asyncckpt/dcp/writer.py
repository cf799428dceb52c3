"""A StorageWriter for torch.distributed.checkpoint: its planners and collectives, our files and our commit.

    dcp calls               on            here
    set_up_storage_writer   every rank    start over; what an earlier save left open is closed
    prepare_local_plan      every rank    tensors that cannot be stored are refused, before anything is written
    prepare_global_plan     coordinator   the attempt: directory, lock, step, folder; sent to the ranks in their plans
    write_data              every rank    plain values are encoded, tensors copied into an arena and written, synced
    finish                  coordinator   the parts of all ranks are put together and published: the commit

What fails on one rank is carried to all by DCP's collectives, as a CheckpointException; there is no manifest then.
Nothing is pickled here: DCP pickles its plans and results on their way between ranks, but nothing of that reaches a
file.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter as DcpStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from asyncckpt.commit.attempt import Draft, body_structure
from asyncckpt.commit.discover import check_listed
from asyncckpt.commit.root import CheckpointRoot, WriteRoot
from asyncckpt.dcp.attempt import AttemptRef, CoordinatedAttempt, receive_ref, save_lock_held, take_newest_ref
from asyncckpt.dcp.planned_data import encode_values, facts_of, tensors_of, values_apart
from asyncckpt.dcp.rank_part import LocalKeys, SentPart, part_plans
from asyncckpt.dcp.save_planner import SavePlanner as OwnSavePlanner
from asyncckpt.dcp.stager import AsyncStager
from asyncckpt.dcp.stored import DCP_VERSION
from asyncckpt.engine.process.background import senders
from asyncckpt.engine.process.future import as_checkpoint_error
from asyncckpt.engine.save.box_files import write_boxes
from asyncckpt.errors import NotFoundError, UnsupportedError, UsageError
from asyncckpt.format import limits
from asyncckpt.format.coverage import covers
from asyncckpt.format.dtypes import stored_dtype
from asyncckpt.format.names import check_step
from asyncckpt.model.own_rank import own_rank
from asyncckpt.model.store_url import Place, StoreUrl
from asyncckpt.native import Progress
from asyncckpt.options import DeviceOptions, Durability, KeepPolicy, SaveOptions
from asyncckpt.shard.files import ShardTarget
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.directory import Directory
from asyncckpt.storage.folder import check_place
from asyncckpt.storage.store_folder import StoreFolder

PART_INDEX = MetadataIndex("asyncckpt.part")


@dataclass
class _Saving:
    """One save of one writer, in the thread that makes it. is_begun: it is set up, not just sent to a directory."""

    path: Place
    is_begun: bool
    local: list[WriteItem] | None = None
    attempt: CoordinatedAttempt | None = None
    ranks_count: int = 0

    def close(self) -> None:
        if self.attempt is not None:
            self.attempt.close()
            self.attempt = None


class StorageWriter(DcpStorageWriter, AsyncStager):
    """Write DCP checkpoints as steps of an asyncckpt directory.

        dcp.save(state_dict, storage_writer=asyncckpt.dcp.StorageWriter("ckpt"))
        dcp.async_save(state_dict, storage_writer=asyncckpt.dcp.StorageWriter("ckpt"))

    path                 the directory, the same for all ranks, on a file system that they share or in an object store
                         ("s3://..."); missing folders are made
    step                 None: one more than the newest in the directory. A step that exists is a ConflictError: steps
                         are never overwritten
    durability           "fsync": the save returns when the checkpoint survives a loss of power. "none": nothing is
                         synced
    keep                 how many of the newest checkpoints stay, or a KeepPolicy without a metric; None keeps all
    parallel             most shard files of a rank
    host_memory_limit    bytes that staging may take; None: a share of what is free. Without room, files are written in
                         chunks, and async_save copies into memory that is new each time
    device               see AsyncStager

    `dcp.async_save` stages with the writer itself (see AsyncStager) unless another stager is given. The coordinator
    holds the directory's lock from its plan to the commit; a store has none. A writer may be used for many saves, also
    at once from several threads. Source of the interface: torch.distributed.checkpoint.StorageWriter.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        durability: Durability = "fsync",
        keep: int | KeepPolicy | None = None,
        parallel: int = 8,
        host_memory_limit: int | None = None,
        device: DeviceOptions = DeviceOptions(),
    ) -> None:
        AsyncStager.__init__(self, host_memory_limit=host_memory_limit, device=device)
        step = check_step(step)
        self._path = check_place(path)
        self._step = step
        self._options = SaveOptions(
            parallel=parallel,
            durability=durability,
            host_memory_limit=host_memory_limit,
            keep=KeepPolicy.of(keep, has_metadata=False),
            device=device,
        )

    @property
    def checkpoint_id(self) -> str:
        """The directory."""
        return str(self._path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it can name a directory."""
        try:
            check_place(checkpoint_id)
        except UsageError:
            return False
        return True

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    @uninterrupted
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Save into another directory from now on, if one is named; a save that is under way keeps its own."""
        if checkpoint_id is not None:
            self._path = path = check_place(checkpoint_id)
            self.close()
            _savings()[self] = _Saving(path, is_begun=False)

    @uninterrupted
    def close(self) -> None:
        """Close what a save of this thread that failed on another rank left open. Not needed after other saves."""
        saving = _savings().pop(self, None)
        if saving is not None:
            saving.close()

    @uninterrupted
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        named = _savings().get(self)
        path = self._path if named is None or named.is_begun else named.path
        self.close()
        take_newest_ref()
        if not kwargs.get("use_collectives", True) and own_rank(None, None)[1] > 1:
            raise UnsupportedError(
                "use_collectives=False would commit every rank by itself", expected="one checkpoint of all ranks"
            )
        _savings()[self] = _Saving(path, is_begun=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.tensor_data is not None:
                name, data = item.index.fqn, item.tensor_data
                limits.check_array(name, data.size, stored_dtype(data.properties.dtype, owner=name))
        if plan.items:  # Else, perhaps, of a planner that sends nothing because nothing has changed.
            self._saving().local = plan.items
        return plan

    @uninterrupted
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        saving = self._saving()
        try:
            saving.attempt = begun = CoordinatedAttempt(saving.path, self._step, self._options)
        except BaseException as error:
            raise as_checkpoint_error(error, self._step) from error.__cause__
        saving.ranks_count = len(plans)
        if len(plans) == 1:
            receive_ref(begun.attempt, 0, 1)  # Nothing is sent to a single rank.
        refs = [AttemptRef(begun.attempt, rank, len(plans)) for rank in range(len(plans))]
        return [replace(plan, storage_data=ref) for plan, ref in zip(plans, refs, strict=True)]

    @uninterrupted
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        saving, ref = self._saving(), take_newest_ref()
        if ref is None:
            raise UsageError("the plan was not made by this StorageWriter", found=type(plan.storage_data))
        try:
            sent = self._write(plan, planner, saving, ref)
        except BaseException as error:
            if ref.ranks_count == 1:
                self.close()
            raise as_checkpoint_error(error, ref.attempt.step) from error.__cause__
        future: Future[list[WriteResult]] = Future()
        bytes_written = sum(file.bytes for file in sent.files)
        future.set_result([WriteResult(index=PART_INDEX, size_in_bytes=bytes_written, storage_data=sent)])
        return future

    def _write(self, plan: SavePlan, planner: SavePlanner, saving: _Saving, ref: AttemptRef) -> SentPart:
        local = saving.local or local_items(planner)
        paths = getattr(planner, "mappings", None)
        names = LocalKeys.of([*local, *plan.items]).values
        found, apart = values_apart(names, plan, planner)
        facts = facts_of(apart, plan)
        part = part_plans.plan(plan.items, local, paths, facts, rank=ref.rank, parallel=self._options.parallel)
        values = tuple(encode_values(part, found, apart))
        tensors = tensors_of(part.items, planner) + [apart[name].tensors[number] for name, number in part.inner]
        with save_lock_held("save", saving.path, ref.attempt.step), _folder_of(saving, ref) as folder:
            target = ShardTarget(folder, ref.attempt, self._options, Progress(), sender=senders)
            files, digests = write_boxes(part.boxes, tensors, target)
            if ref.rank and self._options.durability == "fsync":
                folder.sync()  # Rank 0 does so when it commits.
            check_listed(folder, files, step=ref.attempt.step)
        return SentPart(ref.rank, ref.attempt.id, files, values, part.boxes.body, digests)

    @uninterrupted
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        saving = self._saving()
        begun = saving.attempt
        if begun is None:
            raise UsageError("finish() without a plan")
        try:
            check_whole(metadata)
            begun.commit(_draft(begun, _parts(begun, results, saving.ranks_count)))
        except BaseException as error:
            raise as_checkpoint_error(error, begun.attempt.step) from error.__cause__
        finally:
            self.close()
        metadata.storage_meta = StorageMeta(checkpoint_id=str(saving.path))
        if hasattr(metadata, "version"):
            metadata.version = DCP_VERSION

    def _saving(self) -> _Saving:
        saving = _savings().get(self)
        if saving is None:
            raise UsageError("a StorageWriter was not set up in this thread", hint="let dcp.save call it")
        return saving


# Of every thread its saves, so that a writer which serves two at once keeps them apart, and has nothing to pickle.
_in_thread = threading.local()


def _savings() -> weakref.WeakKeyDictionary[StorageWriter, _Saving]:
    found: weakref.WeakKeyDictionary[StorageWriter, _Saving] | None = getattr(_in_thread, "savings", None)
    if found is None:
        found = _in_thread.savings = weakref.WeakKeyDictionary()
    return found


def local_items(planner: SavePlanner) -> list[WriteItem]:
    """Return what a planner has sent last that sends no plan now because nothing has changed."""
    if isinstance(planner, OwnSavePlanner):
        return planner.local_items or []
    cached: Mapping[str, SavePlan] = getattr(planner, "_cached_save_plan", {})
    plan = cached.get(getattr(planner, "_cached_plans_key", ""))
    return [] if plan is None else plan.items


@contextmanager
def _folder_of(saving: _Saving, ref: AttemptRef) -> Iterator[Directory | StoreFolder]:
    """Give the attempt's folder: the coordinator's own, or opened for the time of the writing."""
    if saving.attempt is not None:
        yield saving.attempt.transaction.place
        return
    with ExitStack() as opened:
        try:
            root = _joined(saving.path)
            opened.callback(root.close)
            folder = root.data.child(ref.attempt.directory)
            opened.callback(folder.close)
        except NotFoundError as error:
            raise UsageError(
                "this rank does not see the folder that the coordinator has made",
                found=str(saving.path),
                hint="all ranks need the same path, on a file system that they share",
            ) from error
        yield folder


def _joined(path: Place) -> WriteRoot:
    if isinstance(path, StoreUrl):
        from asyncckpt.commit.store_root import StoreRoot  # Who has a disk loads nothing of stores.
        from asyncckpt.storage.object_store import ObjectStore

        return StoreRoot(ObjectStore(path))  # The coordinator has looked at it.
    return CheckpointRoot.for_joining(path, exact_modes=False)


def _parts(begun: CoordinatedAttempt, results: Sequence[Sequence[WriteResult]], ranks_count: int) -> list[SentPart]:
    """Return the parts of all ranks, in their order. Raises UsageError if one is missing or of another attempt."""
    parts = [one.storage_data for result in results for one in result if isinstance(one.storage_data, SentPart)]
    by_rank = {part.rank: part for part in parts if part.attempt == begun.attempt.id}
    for rank in range(ranks_count):
        if rank not in by_rank:
            raise UsageError(
                f"rank {rank} has written nothing for step {begun.attempt.step}",
                found=[(part.rank, part.attempt) for part in parts[:8]],
                expected=f"a part of every rank for attempt {begun.attempt.id}",
            )
    return [by_rank[rank] for rank in range(ranks_count)]


def _draft(begun: CoordinatedAttempt, parts: Sequence[SentPart]) -> Draft:
    first, others = parts[0], parts[1:]
    return Draft(
        head=begun.transaction.head(
            ranks_count=len(parts), files=tuple(file for part in parts for file in part.files), values=first.values
        ),
        body=first.body,
        digests=first.digests,
        others=[part.part_text for part in others],
        structures=[body_structure(part.body) for part in parts],
    )


# The items that were checked last.
_checked: list[object] = []


def check_whole(metadata: Metadata) -> None:
    """Raise UsageError for a tensor of which the ranks together do not have every element exactly once."""
    if any(checked is metadata.state_dict_metadata for checked in _checked):
        return  # A planner that keeps its plans gives the very same.
    for name, item in metadata.state_dict_metadata.items():
        if not isinstance(item, TensorStorageMetadata) or (len(item.chunks) == 1 and item.chunks[0].sizes == item.size):
            continue
        boxes = [
            tuple((begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
            for chunk in item.chunks
        ]
        if not covers(boxes, item.size, name=name):
            raise UsageError(
                f"tensor {name!r} is incomplete, or some of it is given twice",
                found=[(list(chunk.offsets), list(chunk.sizes)) for chunk in item.chunks[:8]],
                expected=f"every element of {list(item.size)} once",
            )
    _checked[:] = [metadata.state_dict_metadata]
