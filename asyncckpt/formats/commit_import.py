"""Commit what another library wrote as a step of ours: block by block, so memory holds windows and two buffers.

A format opens its files as an Importable, which says all that this needs; `look_into` and `run_import` are the same for
each of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import xxhash

from asyncckpt.commit.attempt import Draft, claims, step_exists
from asyncckpt.commit.discover import committed_steps, is_committed
from asyncckpt.commit.import_source import ImportSource, check_is_apart, reading, statuses
from asyncckpt.commit.root import WriteRoot, open_root
from asyncckpt.commit.transaction import Transaction
from asyncckpt.engine.compact.copy_blocks import CopiedBlocks, write_blocks
from asyncckpt.engine.load.verify import verify_new
from asyncckpt.engine.process.background import background, senders
from asyncckpt.engine.process.future import as_checkpoint_error
from asyncckpt.engine.process.held_directory import commits_of, open_alone
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.errors import CheckpointError, NotFoundError
from asyncckpt.format.manifest import RankPart
from asyncckpt.format.names import Attempt, parse
from asyncckpt.format.write_manifest import BodyTemplate, PartText, encode_part, render_body
from asyncckpt.formats.conversion import Conversion, Facts
from asyncckpt.model.enough_memory import enough_memory
from asyncckpt.model.result import SaveResult
from asyncckpt.model.source import ByteSource
from asyncckpt.model.store_url import Place
from asyncckpt.options import BusyPolicy
from asyncckpt.plan.rename import Names
from asyncckpt.shard.files import ShardTarget
from asyncckpt.shard.reader import ChainReader
from asyncckpt.shard.stored_rows import stored_source
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.directory import Directory
from asyncckpt.storage.store_answers import NoBucketError
from asyncckpt.storage.written_chunks import WrittenChunks


@dataclass(frozen=True)
class Importable:
    """An open checkpoint of another library.

    parts      what its ranks hold, as it is going to be
    source_of  returns the bytes of a block, by its number in all parts
    facts      what it is, for people (conversion.py)
    step       which one it becomes; None: one more than the newest
    check      reads what is to be checked before anything is written
    files      beside the source: what it consists of

    An import that was killed is gone on with if nothing of this has changed since: the version of asyncckpt, the
    target, the step, the names and options, and of each file of the source place, size and times.
    """

    parts: Sequence[RankPart]
    source_of: Callable[[int], ByteSource]
    facts: Facts
    step: int | None
    check: Callable[[], None] = lambda: None
    files: Sequence[Path] = ()

    def renamed(self, names: Names) -> Importable:
        """Return the same under other names. UsageError."""
        facts = dict(self.facts)
        if "tables" in facts:
            facts["tables"] = {names.name(name): rows for name, rows in self.facts["tables"].items()}
        return replace(self, parts=names.parts(self.parts), facts=facts)


def blocks_of(reader: ChainReader) -> Callable[[int], ByteSource]:
    """Return the blocks that a reader gives, for `source_of`."""
    return partial(stored_source, reader, rows=None)


def look_into(asked: Conversion, opening: AbstractContextManager[Importable]) -> Facts:
    """Say what an import would do. Raises what it would before it reads data."""
    check_is_apart(asked.foreign, asked.target)
    with reading(asked.foreign), opening as opened:
        found = opened.renamed(asked.names)
        check_step_is_free(asked.target, found.step)
        return asked.facts(**{**found.facts, "step": found.step, "reused": _noted_bytes(asked, found)})


@uninterrupted
def run_import(asked: Conversion, opening: AbstractContextManager[Importable]) -> tuple[SaveResult, Facts]:
    """Import, and return when it is durable; with the facts of the source."""
    begun = time.perf_counter()
    check_is_apart(asked.foreign, asked.target)
    source = ImportSource([asked.foreign])
    with reading(asked.foreign), opening as opened:
        found = opened.renamed(asked.names)
        beside = ImportSource(found.files)
        found.check()
        asked.expect(sum(block.placed.spec.bytes for part in found.parts for block in part.blocks))
        result, reused = commit_import(asked, found, [source, beside])
    if asked.verify:
        verify_new(asked.target, result.step, asked.progress)
    result = replace(result, seconds=time.perf_counter() - begun)
    done = {"step": result.step, "reused": reused, "bytes": result.bytes_written, "seconds": result.seconds}
    return result, asked.facts(**{**found.facts, **done})


def commit_import(asked: Conversion, found: Importable, sources: Sequence[ImportSource] = ()) -> tuple[SaveResult, int]:
    """Copy all blocks into a new step; returns when it is durable, with the bytes that were there already. Waits while
    a save or load of this process is in flight. sources: must be still when all is copied."""
    begun = time.perf_counter()
    with save_lock.held("save", asked.target, found.step, busy=BusyPolicy("wait")):
        step, files_bytes, reused = _copy(asked, found, sources)
    result = SaveResult(
        step=step,
        kind="full",
        path=asked.target,
        seconds=time.perf_counter() - begun,
        bytes_logical=sum(block.placed.spec.bytes for part in found.parts for block in part.blocks),
        bytes_written=files_bytes,
        rows_count=sum(facts.rows_count for part in found.parts for facts in part.tables),
    )
    return result, reused


def check_step_is_free(path: Place, step: int | None) -> None:
    """Raise ConflictError for a step that exists; there need not be a directory yet."""
    try:
        with open_root(path) as root:
            if step is not None and is_committed(root, step):
                raise step_exists(root, step)
    except NoBucketError:
        raise
    except NotFoundError:
        return


def _copy(asked: Conversion, found: Importable, sources: Sequence[ImportSource]) -> tuple[int, int, int]:
    """Copy and commit; return the step, the bytes of all files, and how many of them were there already."""
    identity = _identity(asked, found)
    with ExitStack() as held:
        opened = open_alone(asked.target, exact_modes=False)
        held.callback(opened.close)
        root, commits = opened.root, commits_of(opened.root, opened.lock, asked.options.durability)
        # Without the lock, another process may write there still; objects are there in full, or not at all.
        attempt_of = Attempt.new if commits.lock is None else partial(_attempt, root, identity)
        claim = held.enter_context(claims.save(root, found.step, attempt_of))
        transaction = held.enter_context(Transaction.begin(commits, claim, goes_on=True))
        written = None
        if isinstance(transaction.place, Directory):
            written = held.enter_context(closing(WrittenChunks.open(transaction.place, identity)))
        target = ShardTarget(
            transaction.place, claim.attempt, asked.options, asked.progress, written=written, sender=senders
        )
        try:
            with enough_memory(f"an import of step {claim.step} into {str(root.path)!r}"):
                draft = _write(found, transaction, target)
            for source in sources:
                source.check_still()
            if written is not None:
                written.end()
            published = background.run(lambda: transaction.commit(draft), "an import")
        except (OSError, MemoryError) as error:
            raise as_checkpoint_error(error, claim.step) from error
        bytes = published.manifest_bytes + sum(file.bytes for file in draft.head.files)
        return claim.step, bytes, 0 if written is None else written.reused_bytes


def _identity(asked: Conversion, found: Importable) -> str:
    """Return what two imports have in common that write the same bytes."""
    columns = [block.placed.spec.name for part in found.parts for block in part.blocks]
    facts = [(str(path), *status) for path, status in sorted(statuses([asked.foreign, *found.files]).items())]
    return asked.identity(facts, xxhash.xxh3_128_hexdigest(repr(columns).encode()))


def _attempt(root: WriteRoot, identity: str, step: int) -> Attempt:
    """Return the attempt that was left with this identity, or a new one."""
    return next((attempt for attempt, _ in _left(root, identity, step)), None) or Attempt.new(step)


def _left(root: WriteRoot, identity: str, step: int) -> Iterator[tuple[Attempt, int]]:
    """Yield attempts at a step that were left with this identity, and how many bytes are noted of each."""
    for name in root.data.names():
        found = parse(name)
        if found is not None and found.kind == "attempt" and found.step == step:
            with suppress(CheckpointError), root.data.child(name) as folder:
                noted = WrittenChunks.noted_bytes(folder, identity) if isinstance(folder, Directory) else None
                if noted is not None:
                    yield Attempt(step, found.attempt), noted


def _noted_bytes(asked: Conversion, found: Importable) -> int:
    """Return how much of an import was written and left."""
    try:
        with open_root(asked.target) as root:
            step = max([-1, *committed_steps(root)[-1:]]) + 1 if found.step is None else found.step
            return next((noted for _, noted in _left(root, _identity(asked, found), step)), 0)
    except NotFoundError:
        return 0


def _write(found: Importable, transaction: Transaction, target: ShardTarget) -> Draft:
    written: list[CopiedBlocks] = []
    first = 0
    for part in found.parts:
        numbers = range(first, first + len(part.blocks))
        specs = [block.placed.spec for block in part.blocks]
        written.append(write_blocks(specs, [found.source_of(number) for number in numbers], target, rank=part.rank))
        first += len(part.blocks)
    bodies = [render_body(part.tables, part.tree, own.blocks) for part, own in zip(found.parts, written, strict=True)]
    files = tuple(file for own in written for file in own.files)
    return Draft(
        head=transaction.head(ranks_count=len(found.parts), files=files, values=()),
        body=bodies[0],
        digests=written[0].digests,
        others=_others(written, bodies),
    )


def _others(written: Sequence[CopiedBlocks], bodies: Sequence[BodyTemplate]) -> list[PartText]:
    return [encode_part(own.files, (), body, own.digests) for own, body in zip(written[1:], bodies[1:], strict=True)]
