"""Fold the chain of a delta checkpoint into a full one of the same step, beside training or without it.

1. Read the chain of the step and open all of its files, so that retention cannot take them away.
2. For each table of several layers read the ids and the removed ids, verified, and find the rows that count: the newest
   of each id that no newer layer has removed.
3. Give every block its place. A new block comes from one stored block: all of it as it is stored, or some of its rows.
4. Write the shard files, of every rank its own, into a new attempt's folder; every stored block that is read is
   verified on the way.
5. Look whether the step is still there, and publish `manifests/<step>.full.json`. The first manifest stays as it is.

Nothing is changed before 5, so a crash leaves the chain as it was, and leftovers that the next save sweeps. A save of
this process must not sweep the folder of a compaction that runs beside it: see running_compactions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from asyncckpt.commit.chain import read_chain
from asyncckpt.commit.discover import newest_step, read_manifest
from asyncckpt.commit.publish import abandon_attempt, begin_attempt, publish
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.engine.fold import FoldedPart, fold_chain
from asyncckpt.engine.running_compactions import running_compactions
from asyncckpt.engine.save_steps import WRITER, as_ours
from asyncckpt.errors import ConflictError, IndeterminateError, SaveCancelledError
from asyncckpt.format.chain import Chain
from asyncckpt.format.manifest import BodyTemplate, FileFacts, encode_manifest, encode_part, render_body
from asyncckpt.format.names import Attempt
from asyncckpt.model.result import SaveResult
from asyncckpt.native import U8, Progress, core, paged
from asyncckpt.options import CHUNK_BYTES, SaveOptions
from asyncckpt.pipeline.threads import IdleEndingThreads
from asyncckpt.plan.image import plan_image
from asyncckpt.shard.reader import ChainReader
from asyncckpt.shard.stored_rows import stored_source
from asyncckpt.shard.stream import stream_sources
from asyncckpt.storage.directory import Directory


def run_compaction(
    root: CheckpointRoot,
    step: int | None = None,
    *,
    options: SaveOptions,
    progress: Progress,
    may_commit: Callable[[], bool] | None = None,
) -> SaveResult:
    """Compact a step (default: the newest) and return when that is durable. Needs no save lock.

    Runs on a thread without an event loop, where no KeyboardInterrupt is raised: a worker. The caller holds the
    directory's LOCK. A step that is full, or compacted already, is left as it is: the result says `skipped`. Of
    `options` the number of files and the durability are used. Raises NotFoundError, also when retention has removed the
    step meanwhile, CorruptError, IncompatibleError, UnsupportedError, ConflictError, IndeterminateError, IOFailedError,
    and SaveCancelledError after `progress.cancel()`.

    may_commit: asked once, right before the commit; False: it was cancelled. Afterwards a cancel comes too late.
    """
    begun = time.perf_counter()
    step = newest_step(root) if step is None else step
    attempt = Attempt.new(step)
    with running_compactions.enter(root, attempt):
        chain = read_chain(root, step)
        if chain.newest.head.kind == "full":
            return SaveResult(step=step, kind="full", path=root.path, skipped=True, seconds=time.perf_counter() - begun)
        try:
            folded, bytes_written = _compact(
                root, chain, attempt, options=options, progress=progress, may_commit=may_commit
            )
        except (OSError, MemoryError) as error:
            raise as_ours(error, step) from error
    return SaveResult(
        step=step,
        kind="full",
        path=root.path,
        seconds=time.perf_counter() - begun,
        bytes_logical=sum(part.bytes for part in folded),
        bytes_written=bytes_written,
    )


def _compact(
    root: CheckpointRoot,
    chain: Chain,
    attempt: Attempt,
    *,
    options: SaveOptions,
    progress: Progress,
    may_commit: Callable[[], bool] | None,
) -> tuple[list[FoldedPart], int]:
    with ChainReader(root.data, chain, threads=1, verify=True, progress=Progress()) as reader:
        folded = fold_chain(chain, reader, progress)
        reader.verify = False  # From here blocks are read by windows, and their sources verify them.
        folder = begin_attempt(root, attempt)
        try:
            raw, files_bytes = _write(chain, folded, reader, folder, attempt, options=options, progress=progress)
            _check_still_there(root, chain, folder)
            if progress.cancelled or (may_commit is not None and not may_commit()):
                raise SaveCancelledError(f"compaction of step {chain.step} was cancelled")
            durable = options.durability == "fsync"
            threads = IdleEndingThreads("asyncckpt-compaction", 1)
            asyncio.run(publish(root, folder, attempt, raw, durable=durable, threads=threads, compacted=True))
        except IndeterminateError:
            raise  # The manifest may be there: its data must stay.
        except BaseException:
            abandon_attempt(root, attempt)
            raise
        finally:
            folder.close()
    return folded, files_bytes + len(raw)


def _check_still_there(root: CheckpointRoot, chain: Chain, folder: Directory) -> None:
    """Nothing may come back that retention, or somebody's hand, has removed meanwhile; nor may our files be gone."""
    if read_manifest(root, chain.step).digest != chain.newest.digest:
        raise ConflictError(f"step {chain.step} of {str(root.path)!r} was rewritten while it was compacted")
    if not folder.is_still(folder.path):
        raise ConflictError(f"folder {str(folder.path)!r} was removed while step {chain.step} was compacted")


def _write(
    chain: Chain,
    folded: Sequence[FoldedPart],
    reader: ChainReader,
    folder: Directory,
    attempt: Attempt,
    *,
    options: SaveOptions,
    progress: Progress,
) -> tuple[bytearray, int]:
    """Write the shard files of all ranks; returns the manifest, and the bytes of all files."""
    written = [_write_part(part, reader, folder, attempt, options=options, progress=progress) for part in folded]
    others = [
        encode_part(own.files, part.was.values, own.body, own.digests)
        for part, own in zip(folded[1:], written[1:], strict=True)
    ]
    head = replace(
        chain.newest.head,
        kind="full",
        parents=(),
        attempt=attempt.id,
        writer=WRITER,
        files=written[0].files,
        replaces=chain.newest.digest,
    )
    raw = encode_manifest(head, written[0].body, written[0].digests, others)
    return raw, sum(file.bytes for own in written for file in own.files)


@dataclass(frozen=True)
class _WrittenPart:
    files: tuple[FileFacts, ...]
    body: BodyTemplate
    digests: U8


def _write_part(
    part: FoldedPart,
    reader: ChainReader,
    folder: Directory,
    attempt: Attempt,
    *,
    options: SaveOptions,
    progress: Progress,
) -> _WrittenPart:
    """Write the shard files of one rank."""
    image = plan_image([copy.spec for copy in part.copies], parallel=options.parallel, rank=part.was.rank)
    sources = [stored_source(reader, copy.number, copy.rows) for copy in part.copies]
    # Buffers of its own: those of saves are held by a save for as long as it takes.
    size = min(CHUNK_BYTES, max(paged(file.bytes) for file in image.files))
    memory = core.map_memory(2 * size)
    try:
        files, digests = stream_sources(
            image,
            sources,
            buffers=(memory.address, memory.address + size),
            writer=IdleEndingThreads("asyncckpt-compaction", 1),
            folder=folder,
            attempt=attempt,
            options=options,
            progress=progress,
        )
    finally:
        memory.close()
    filtered = [number for number, copy in enumerate(part.copies) if reader.block(copy.number).filtered]
    body = render_body(part.tables, part.was.tree, image.blocks, filtered=filtered)
    return _WrittenPart(files=files, body=body, digests=digests)
