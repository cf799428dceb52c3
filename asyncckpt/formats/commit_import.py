"""Commit what another library wrote as a step of ours: block by block, so memory holds windows and two buffers."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from asyncckpt.commit.claims import claims, step_exists
from asyncckpt.commit.discover import is_committed
from asyncckpt.commit.proof import Draft
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.commit.transaction import Transaction
from asyncckpt.engine.compact.copy_blocks import BlockCopy, CopiedBlocks, copy_blocks
from asyncckpt.engine.load.verify import verify as verify_step
from asyncckpt.engine.process.background import background
from asyncckpt.engine.process.future import as_checkpoint_error
from asyncckpt.engine.process.held_directory import held_directory
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.errors import NotFoundError, UsageError
from asyncckpt.format.manifest import Chain
from asyncckpt.format.write_manifest import BodyTemplate, PartText, encode_part, render_body
from asyncckpt.model.result import SaveResult
from asyncckpt.native import Progress
from asyncckpt.options import BusyPolicy, SaveOptions
from asyncckpt.shard.reader import ChainReader
from asyncckpt.shard.target import ShardTarget


def commit_import(
    path: Path, step: int | None, chain: Chain, reader: ChainReader, options: SaveOptions, progress: Progress
) -> SaveResult:
    """Copy all blocks of a chain of one manifest into a new step; returns when it is durable. Waits while a save or
    load of this process is in flight."""
    begun = time.perf_counter()
    with save_lock.held("save", path, step, busy=BusyPolicy("wait")):
        step, files_bytes = _copy(path, step, chain, reader, options, progress)
    return SaveResult(
        step=step,
        kind="full",
        path=path,
        seconds=time.perf_counter() - begun,
        bytes_logical=sum(block.placed.spec.bytes for block in chain.blocks),
        bytes_written=files_bytes,
        rows_count=sum(facts.rows_count for facts in chain.newest.tables),
    )


def verify_import(path: Path, step: int, progress: Progress) -> None:
    """Read a new step once more and compare it with the digests of what was copied. CorruptError."""
    with CheckpointRoot.for_reading(path) as root:
        verify_step(root, step, progress=progress)


def check_is_apart(source: Path, target: Path) -> None:
    """Raise UsageError for a target that is the folder of a source, or in it: that would not stay as it is."""
    real, place = (Path(os.path.realpath(path)) for path in (source, target))
    if place == real or real in place.parents:
        raise UsageError("an import cannot go into its own source", found=str(target), expected="another place")


def check_step_is_free(path: Path, step: int | None) -> None:
    """Raise ConflictError for a step that exists; there need not be a directory yet."""
    try:
        with CheckpointRoot.for_reading(path) as root:
            if step is not None and is_committed(root, step):
                raise step_exists(root, step)
    except NotFoundError:
        return


def _copy(
    path: Path, step: int | None, chain: Chain, reader: ChainReader, options: SaveOptions, progress: Progress
) -> tuple[int, int]:
    """Copy and commit; return the step, and the bytes of all files."""
    with (
        CheckpointRoot.for_writing(path) as root,
        held_directory(root, options.durability) as commits,
        claims.save(root, step) as claim,
        Transaction.begin(commits, claim) as transaction,
    ):
        target = ShardTarget(transaction.folder, transaction.attempt, options, progress)
        try:
            draft = _write(chain, reader, transaction, target)
            published = background.run(lambda: transaction.commit(draft), "an import")
        except (OSError, MemoryError) as error:
            raise as_checkpoint_error(error, claim.step) from error
        return claim.step, published.manifest_bytes + sum(file.bytes for file in draft.head.files)


def _write(chain: Chain, reader: ChainReader, transaction: Transaction, target: ShardTarget) -> Draft:
    parts = chain.newest.parts
    written: list[CopiedBlocks] = []
    first = 0
    for part in parts:
        numbers = range(first, first + len(part.blocks))
        copies = [BlockCopy(number, None, reader.block(number).placed.spec) for number in numbers]
        written.append(copy_blocks(copies, reader, target, rank=part.rank))
        first += len(part.blocks)
    bodies = [render_body(part.tables, part.tree, own.blocks) for part, own in zip(parts, written, strict=True)]
    files = tuple(file for own in written for file in own.files)
    return Draft(
        head=transaction.head(ranks_count=len(parts), files=files, values=()),
        body=bodies[0],
        digests=written[0].digests,
        others=_others(written, bodies),
    )


def _others(written: Sequence[CopiedBlocks], bodies: Sequence[BodyTemplate]) -> list[PartText]:
    return [encode_part(own.files, (), body, own.digests) for own, body in zip(written[1:], bodies[1:], strict=True)]
