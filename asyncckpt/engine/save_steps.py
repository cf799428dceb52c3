"""Steps of a save in the background that are the same for one rank and for many."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from asyncckpt.commit.retention import sweep
from asyncckpt.engine.future import FutureState
from asyncckpt.engine.job import SaveJob
from asyncckpt.engine.messages import log_warning
from asyncckpt.engine.running_compactions import running_compactions
from asyncckpt.engine.write_files import Written
from asyncckpt.errors import CheckpointError, ConflictError, IOFailedError, SaveCancelledError
from asyncckpt.format.manifest import FileFacts, ManifestHead, ParentFacts
from asyncckpt.format.names import Attempt, compacted_manifest_name, manifest_name
from asyncckpt.storage.directory import io_failed

try:
    WRITER = f"asyncckpt {version('asyncckpt')}"
except PackageNotFoundError:  # Run from a source tree that was never installed.
    WRITER = "asyncckpt"


@dataclass(frozen=True)
class Committed:
    """A save that has committed, as this rank knows it.

    parent: this checkpoint, as the parent of a later one; None when that is not known here. head: on the rank that
    published it. bytes_written: by this rank.
    """

    written: Written
    parent: ParentFacts | None
    parents: tuple[ParentFacts, ...]
    head: ManifestHead | None
    bytes_written: int


def go_on(job: SaveJob, state: FutureState) -> None:
    """Enter the next state, unless the save was cancelled."""
    if not job.future.enter(state):
        raise SaveCancelledError(f"save of step {job.step} was cancelled")


def as_ours(error: BaseException, step: int | None) -> BaseException:
    """An error of the system that passed no door, as one of this library; others as they are."""
    save = "the save" if step is None else f"the save of step {step}"
    if isinstance(error, MemoryError):
        wrapped = IOFailedError(f"{save} ran out of memory", hint="lower host_memory_limit, or use save()")
    elif isinstance(error, OSError) and not isinstance(error, CheckpointError):
        wrapped = io_failed(f"{save} failed", error)
    else:
        return error
    wrapped.__cause__ = error
    return wrapped


def sweep_leftovers(job: SaveJob, attempt: Attempt) -> None:
    """What cannot be swept is in nobody's way."""
    try:
        sweep(job.target.root, job.target.heads, keep_attempts=running_compactions.beside(attempt))
    except CheckpointError as error:
        log_warning("leftovers in %s were kept: %s", job.target.root.path, error)


def check_parents(job: SaveJob, parents: tuple[ParentFacts, ...]) -> None:
    """Before a delta is published: what it builds upon is still there, down to a full checkpoint."""
    root = job.target.root
    for parent in parents:
        if root.manifests.exists(compacted_manifest_name(parent.step)):
            return
        if not root.manifests.exists(manifest_name(parent.step)):
            raise ConflictError(
                f"step {parent.step}, which the delta of step {job.step} builds upon, is not there any more",
                hint="save a full checkpoint: kind='full'",
            )


def head_of(
    job: SaveJob,
    attempt: Attempt,
    files: tuple[FileFacts, ...],
    *,
    parents: tuple[ParentFacts, ...],
    ranks_count: int = 1,
) -> ManifestHead:
    return ManifestHead(
        step=job.step,
        kind="delta" if parents else "full",
        parents=parents,
        attempt=attempt.id,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        writer=WRITER,
        ranks_count=ranks_count,
        files=files,
        values=job.values,
        metadata=job.metadata,
    )
