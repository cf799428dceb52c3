"""Steps of a save in the background that are the same for one rank and for many."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from asyncckpt.commit.proof import body_structure
from asyncckpt.commit.transaction import Transaction
from asyncckpt.engine.process.background import committer
from asyncckpt.engine.process.future import FutureState
from asyncckpt.engine.save.save_job import SaveJob
from asyncckpt.engine.save.write_files import Written
from asyncckpt.errors import CheckpointError, IOFailedError, SaveCancelledError
from asyncckpt.format.manifest import ParentFacts
from asyncckpt.storage.directory import io_failed

T = TypeVar("T")


@dataclass(frozen=True)
class Committed:
    """A save that has committed, as this rank knows it.

    parent: this checkpoint, as the parent of a later one; None when that is not known here. manifest_bytes: on the rank
    that published it, else 0.
    """

    written: Written
    parent: ParentFacts | None
    parents: tuple[ParentFacts, ...]
    manifest_bytes: int = 0

    @property
    def bytes_written(self) -> int:
        """By this rank."""
        return sum(file.bytes for file in self.written.files) + self.manifest_bytes


def enter_state(job: SaveJob, state: FutureState) -> None:
    """Enter the next state, unless the save was cancelled."""
    if not job.future.enter(state):
        raise SaveCancelledError(f"save of step {job.step} was cancelled")


async def run_on(threads: Executor, function: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, function, *arguments)


async def give_up(transaction: Transaction) -> None:
    """Close a transaction when its save has ended; what stays because no thread can be started is swept later."""
    with contextlib.suppress(CheckpointError):
        await run_on(committer, transaction.close)


def as_checkpoint_error(error: BaseException, step: int | None) -> BaseException:
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


def structure_of(written: Written) -> str:
    """A digest of what the part of a rank says beside digests, and beside rows of tables where it is known without."""
    if written.structure is None:
        return body_structure(written.body)
    tables = [(facts.name, facts.shard, facts.whole, bool(facts.removed_count)) for facts in written.tables]
    return f"{written.structure} {len(written.body.holes)} {tables}"
