"""Import a directory of RecIS as a checkpoint of ours: block by block, so memory holds windows and two buffers.

Every shard of RecIS becomes the part of a rank, with the slice that it held, so loads that want some ids alone read no
more shards than before. The checkpoint loads into any number of ranks.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from asyncckpt.arguments import check_choice, check_int, check_type
from asyncckpt.commit.claims import claims
from asyncckpt.commit.proof import Draft
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.commit.transaction import Transaction
from asyncckpt.engine.compact.copy_blocks import BlockCopy, CopiedBlocks, copy_blocks
from asyncckpt.engine.load.verify import verify as verify_step
from asyncckpt.engine.process.background import background
from asyncckpt.engine.process.future import as_checkpoint_error
from asyncckpt.engine.process.held_directory import held_directory
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.format.limits import check_step
from asyncckpt.format.manifest import Chain
from asyncckpt.format.write_manifest import BodyTemplate, PartText, encode_part, render_body
from asyncckpt.formats.recis.directory import RecisDirectory
from asyncckpt.formats.recis.stored import Columns, RecisReader, StoredAs, as_chain, check_columns, step_of
from asyncckpt.model.result import SaveResult
from asyncckpt.native import Progress
from asyncckpt.options import DURABILITIES, PARALLEL_MAX, BusyPolicy, Durability, SaveOptions
from asyncckpt.shard.target import ShardTarget
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.directory import check_path

READ_THREADS = 4
_STEP_FOLDER = re.compile(r"ckpt_([0-9]{1,12})")


def import_checkpoint(
    recis_dir: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    columns: Columns | None = None,
    durability: Durability = "fsync",
    parallel: int = 8,
    verify: bool = True,
) -> SaveResult:
    """Import a checkpoint of RecIS as a step of an asyncckpt directory, and return when it is durable.

    recis_dir   holds `index`; nothing is written there
    path        made with its parents when missing
    step        None: that of a folder `ckpt_<step>`, else one more than the newest
    columns     slot of RecIS -> column, where the default does not fit: `sparse_adam_exp_avg` becomes `exp_avg`
                (likewise of the other optimizers), `step_filter` `last_seen`, anything else keeps its name
    parallel    files of every shard, at most
    verify      read the checkpoint once more in the end, and compare it with the digests of what was copied

    Nothing is committed when an error is raised: NotFoundError, CorruptError, UnsupportedError, UsageError,
    ConflictError for a step that exists or a directory that another process writes to, IndeterminateError,
    IOFailedError. Waits while a save or load of this process is in flight. Takes 300 MiB, and 16 bytes for each row of
    the largest shard of a table.
    """
    check_choice("durability", durability, DURABILITIES)
    check_int("parallel", parallel, at_least=1, at_most=PARALLEL_MAX)
    check_type("verify", verify, bool)
    options = SaveOptions(durability=durability, parallel=parallel)
    source, target = check_path(recis_dir), check_path(path)
    return run_import(source, target, check_step(step), columns, options, Progress(), verify=verify)


@uninterrupted
def run_import(
    source: Path,
    path: Path,
    step: int | None,
    columns: Columns | None,
    options: SaveOptions,
    progress: Progress,
    *,
    verify: bool,
) -> SaveResult:
    """Do the same, with arguments that are checked, and say how far it is."""
    begun = time.perf_counter()
    with RecisDirectory.open(source) as directory:
        step = wanted_step(source, step)
        chain = import_chain(directory, columns)
        reader = RecisReader(directory, chain, threads=READ_THREADS, progress=Progress())
        with reader:
            reader.check_ids()
            with save_lock.held("save", path, step, busy=BusyPolicy("wait")):
                step, files_bytes = _copy(path, step, chain, reader, options, progress)
    if verify:
        with CheckpointRoot.for_reading(path) as root:
            verify_step(root, step)
    return SaveResult(
        step=step,
        kind="full",
        path=path,
        seconds=time.perf_counter() - begun,
        bytes_logical=sum(block.placed.spec.bytes for block in chain.blocks),
        bytes_written=files_bytes,
        rows_count=sum(facts.rows_count for facts in chain.newest.tables),
    )


def wanted_step(source: Path, step: int | None) -> int | None:
    """Return the step that was asked for, else that of a folder `ckpt_<step>`; None: the next one."""
    match = _STEP_FOLDER.fullmatch(source.name)
    return int(match[1]) if step is None and match is not None else step


def import_chain(directory: RecisDirectory, columns: Columns | None) -> Chain:
    """Return the checkpoint as it is going to be imported."""
    checked = check_columns(columns, directory.slots)
    return as_chain(directory, StoredAs(step=step_of(directory), schemas={}, columns=checked, paths={}))


def _copy(
    path: Path, step: int | None, chain: Chain, reader: RecisReader, options: SaveOptions, progress: Progress
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


def _write(chain: Chain, reader: RecisReader, transaction: Transaction, target: ShardTarget) -> Draft:
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
