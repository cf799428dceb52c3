"""Fold the chain of a delta checkpoint into a full one of the same step, beside training or without it.

1. Read the chain of the step and open all of its files, so that retention cannot take them away. In a store nothing is
   open: what another process removes meanwhile ends the compaction.
2. For each table of several layers read the ids and the removed ids, verified, and find the rows that count: the newest
   of each id that no newer layer has removed.
3. Give every block its place. A new block comes from one stored block: all of it as it is stored, or some of its rows.
4. Write the shard files, of every rank its own, into a new attempt's folder; every stored block that is read is
   verified on the way. Saves and loads of this process go first.
5. Commit `manifests/<step>.full.json`, if the step is still there. The first manifest stays as it is.

Nothing is changed before 5, so a crash leaves the chain as it was, and leftovers that the next save sweeps (in a store,
`collect_garbage`). A save of this process does not sweep the folder of a compaction that runs beside it: see
commit/attempt.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from asyncckpt.commit.attempt import Draft, claims
from asyncckpt.commit.chain import read_chain
from asyncckpt.commit.discover import being_removed, is_committed, newest_step, read_manifest
from asyncckpt.commit.root import WriteRoot
from asyncckpt.commit.transaction import Commits, Transaction
from asyncckpt.engine.compact.copy_blocks import CopiedBlocks, PatientReader, copy_blocks
from asyncckpt.engine.compact.fold import FoldedPart, fold_chain
from asyncckpt.engine.process.background import background, rewriters, senders
from asyncckpt.engine.process.future import FutureState, SaveFuture, as_checkpoint_error
from asyncckpt.engine.save.save_job import SaveTarget
from asyncckpt.errors import CheckpointError, CorruptError, NotFoundError, SaveCancelledError
from asyncckpt.format.manifest import Chain, Manifest
from asyncckpt.format.names import check_step
from asyncckpt.format.write_manifest import BodyTemplate, encode_part, render_body
from asyncckpt.model.result import SaveResult
from asyncckpt.native import Progress
from asyncckpt.options import SaveOptions
from asyncckpt.shard.files import ShardTarget
from asyncckpt.shard.reader import ChainReader


def run_compaction(
    commits: Commits,
    step: int | None = None,
    *,
    options: SaveOptions,
    progress: Progress,
    may_commit: Callable[[], bool] = lambda: True,
) -> SaveResult:
    """Compact a step (default: the newest) and return when that is durable. Needs no save lock.

    Runs on a thread of `rewriters`, where no KeyboardInterrupt is raised. The caller holds LOCK, on a disk. A step that
    is full, or compacted already, is left as it is: the result says `skipped`. Of `options` the number of files and the
    durability are used. Raises NotFoundError, also when retention has removed the step meanwhile, CorruptError,
    IncompatibleError, UnsupportedError, ConflictError, IndeterminateError, IOFailedError, and SaveCancelledError after
    `progress.cancel()`.

    may_commit: asked once, right before the commit; False: it was cancelled. Afterwards a cancel comes too late.
    """
    begun = time.perf_counter()
    root = commits.root
    step = newest_step(root) if step is None else step
    with claims.compaction(root, step) as claim:
        going = being_removed(root)
        try:
            chain = read_chain(root, step)
        except CorruptError as error:
            error.say_where(root.path)
            raise
        if chain.newest.head.folder_name in going:
            raise NotFoundError(f"step {step} of {str(root.path)!r} is being removed")
        if chain.newest.head.kind == "full":
            return _skipped(commits, step, begun)
        try:
            with PatientReader(root, chain, cancelled=progress) as reader:
                folded = fold_chain(chain, reader, progress)
                reader.verify = False  # From here blocks are read by windows, and their sources verify them.
                with Transaction.begin(commits, claim) as transaction:
                    target = ShardTarget(transaction.place, transaction.attempt, options, progress, sender=senders)
                    draft = _write(chain, folded, reader, transaction, target)
                    if progress.cancelled or not may_commit():
                        raise SaveCancelledError(f"compaction of step {step} was cancelled")
                    published = background.run(lambda: transaction.commit(draft), "a compaction")
        except CorruptError as error:
            if _is_there(root, chain.newest):
                error.say_where(root.path)
                raise
            what = f"step {step} of {str(root.path)!r} was removed, or saved again, while it was compacted"
            raise NotFoundError(what) from error
        except (OSError, MemoryError) as error:
            raise as_checkpoint_error(error, step) from error
    return SaveResult(
        step=step,
        kind="full",
        path=root.path,
        seconds=time.perf_counter() - begun,
        bytes_logical=sum(part.bytes for part in folded),
        bytes_written=published.manifest_bytes + sum(file.bytes for file in draft.head.files),
    )


def _is_there(root: WriteRoot, newest: Manifest) -> bool:
    """Return whether what is compacted still is the checkpoint of its step."""
    try:
        return read_manifest(root, newest.step).digest == newest.digest
    except NotFoundError:
        return False
    except CheckpointError:
        return True


def _skipped(commits: Commits, step: int, begun: float) -> SaveResult:
    seconds = time.perf_counter() - begun
    return SaveResult(step=step, kind="full", path=commits.root.path, skipped=True, seconds=seconds)


def _write(
    chain: Chain, folded: Sequence[FoldedPart], reader: ChainReader, transaction: Transaction, target: ShardTarget
) -> Draft:
    """Write the shard files of all ranks; return what the manifest is made of."""
    written = [copy_blocks(part.copies, reader, target, rank=part.was.rank) for part in folded]
    bodies = [_body(part, own, reader) for part, own in zip(folded, written, strict=True)]
    was = chain.newest.head
    head = transaction.head(
        created=was.created,
        ranks_count=was.ranks_count,
        files=tuple(file for own in written for file in own.files),
        values=was.values,
        metadata=was.metadata,
        replaces=chain.newest.digest,
        times=was.times,
    )
    others = [
        encode_part(own.files, part.was.values, body, own.digests)
        for part, own, body in zip(folded[1:], written[1:], bodies[1:], strict=True)
    ]
    return Draft(
        head=head,
        body=bodies[0],
        digests=written[0].digests,
        others=others,
    )


def _body(part: FoldedPart, own: CopiedBlocks, reader: ChainReader) -> BodyTemplate:
    filtered = [number for number, copy in enumerate(part.copies) if reader.block(copy.number).filtered]
    was = part.was
    return render_body(part.tables, was.tree, own.blocks, filtered=filtered, sharing=was.sharing, classes=was.classes)


def start_compaction(target: SaveTarget, step: int | None) -> SaveFuture:
    """Begin to compact a step (None: the newest) on a thread of `rewriters`, without the save lock.

    Other ranks leave the work to rank 0 and skip it. One that retention, or a loop that goes back, takes away meanwhile
    ends as skipped: training has nothing to do with it. UsageError; NotFoundError when there is no step at all.
    """
    target.commits.check_not_in_doubt()
    step = check_step(step)
    seen = target.root.in_calls
    chosen = newest_step(seen) if step is None else step
    was_there = step is None or is_committed(seen, chosen)
    what = f"compaction of step {chosen}"
    future = SaveFuture(step=chosen, path=target.root.path, what=what, pools=(rewriters,))
    if target.rank:
        future.skip()
        return future

    def work() -> SaveResult:
        future.enter(FutureState.WRITING)
        begun = time.perf_counter()
        try:
            return run_compaction(
                target.commits,
                chosen,
                options=target.options,
                progress=future.native_progress,
                may_commit=lambda: future.enter(FutureState.COMMITTING),
            )
        except NotFoundError:
            if not was_there:
                raise
            return _skipped(target.commits, chosen, begun)

    rewriters.submit(future.end_with, work)
    return future
