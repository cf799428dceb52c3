"""A save of several ranks, in the background: what this rank does while it talks to the others.

coordination.driver runs the protocol, and calls these effects:

    make_folder   rank 0     sweep; who writes which replica; what a delta builds upon; the attempt's folder
    write         all ranks  filter, write and sync the own files; leave the part of the manifest on the channel
    publish       rank 0     put the parts together, check them, publish: the commit
    abandon       rank 0     remove what an aborted attempt left
    look          all ranks  whether the manifest is there, when no outcome is heard
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from asyncckpt.commit.discover import check_listed
from asyncckpt.commit.doubt import is_committed_whole
from asyncckpt.commit.proof import Draft
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.commit.transaction import Transaction
from asyncckpt.coordination.coordinator import AttemptStart
from asyncckpt.coordination.driver import run_call
from asyncckpt.coordination.messages import AttemptMessage, Begin, Kind, Outcome, Prepared
from asyncckpt.engine.process.background import committer, run_on, workers
from asyncckpt.engine.process.future import FutureState
from asyncckpt.engine.ranks.replicas import (
    check_claims,
    decode_list,
    decode_owners,
    different_owners,
    same_owners,
    who_asks,
)
from asyncckpt.engine.ranks.saver_ranks import Ranks, talkers
from asyncckpt.engine.save.filter_input import Filtered, filter_blocks
from asyncckpt.engine.save.save_job import Committed, SaveJob, Written
from asyncckpt.engine.save.state_cut import RankShare
from asyncckpt.engine.save.write_files import write_files
from asyncckpt.errors import ConflictError, CorruptError, IndeterminateError, NotFoundError
from asyncckpt.format.limits import STEP_MAX
from asyncckpt.format.manifest import FileFacts, ParentFacts, PartText, encode_part
from asyncckpt.format.names import Attempt
from asyncckpt.format.strict_json import Fields, Json, dumps
from asyncckpt.pipeline.filters import identity
from asyncckpt.storage.directory import Directory

FACTS_MAX = 1_000_000


async def save_with_ranks(job: SaveJob, share: RankShare) -> Committed | Outcome:
    """Take one save of all ranks to its commit; an Outcome when another rank has skipped it."""
    ranks = share.ranks
    save = RankSave(job, share, ranks)
    try:
        await save.leave_list()
        outcome = await run_call(ranks.channel, share.call, save.begin(), save, ranks.limits, threads=talkers)
    except BaseException as error:
        ranks.replicas.forget()
        if isinstance(error, IndeterminateError):
            job.target.memory.newest = None
        raise
    finally:
        if save.transaction is not None:
            await save.transaction.give_up()
    if outcome.state != "committed":
        ranks.replicas.forget()
        return outcome
    return save.committed(outcome)


@dataclass
class RankSave:
    """The effects of one save on this rank. Used in the background's loop only."""

    job: SaveJob
    share: RankShare
    ranks: Ranks
    written: Written | None = None
    parents: tuple[ParentFacts, ...] = ()
    transaction: Transaction | None = None
    manifest_bytes: int = 0

    async def leave_list(self) -> None:
        """While it is not known who writes which replica: say which there are here."""
        if not self.share.is_known:
            await self._put(f"list/{self.ranks.rank}", self.share.replicas.encoded())

    def begin(self) -> Begin:
        base = self.job.choice.base
        kind: Kind = "full" if base is None else "delta"
        listed, is_share = self.share.replicas, self.share.is_known
        notes: dict[str, Json] = {"share": is_share}
        if not is_share:
            notes |= {"replicas": listed.digest, "claims": dict(listed.claims)}
        if base is not None:
            notes["parents"] = [[item.step, item.attempt, item.digest] for item in base.chain]
        facts = {"durability": self.job.target.options.durability}
        return Begin(step=self.job.step, kind=kind, facts=facts, notes=notes)

    async def make_folder(self, begins: Mapping[int, Begin]) -> AttemptStart:
        job = self.job
        sent = {rank: Fields(dict(begin.notes), owner=f"rank {rank}", where="notes") for rank, begin in begins.items()}
        notes: dict[str, Json] = {"parents": _common_parents(begins, sent), "replicas": await self._who_writes(sent)}
        self.transaction = await run_on(committer, Transaction.begin, job.target.commits, job.claim)
        return AttemptStart(attempt=self.transaction.attempt, notes=notes)

    async def write(self, attempt: AttemptMessage) -> Mapping[str, Json]:
        job = self.job
        notes = Fields(dict(attempt.notes), owner="rank 0", where="notes")
        self.parents = _parents(notes) if attempt.kind == "delta" else ()
        await self._take_share(notes.text("replicas"))
        filtered = Filtered()
        if job.target.filter_func is not identity:
            job.enter(FutureState.FILTERING)
            filtered = await run_on(workers, filter_blocks, job)
        job.enter(FutureState.WRITING)
        if self.transaction is not None:
            folder = self.transaction.folder
            self.written = written = await run_on(workers, write_files, job, filtered, folder, attempt.attempt)
        else:
            with _attempt_folder(job.target.root, attempt.attempt) as folder:
                self.written = written = await run_on(workers, write_files, job, filtered, folder, attempt.attempt)
                await run_on(committer, self._check_own, folder)
        job.enter(FutureState.COMMITTING)
        if self.ranks.is_coordinator:
            return {"structure": written.structure}
        part = encode_part(written.files, job.values, written.body, written.digests)
        await self._put(f"part/{self.ranks.rank}", part.text)
        return {
            "structure": written.structure,
            "digest": xxhash.xxh3_128_hexdigest(part.text),
            "features": sorted(part.features),
            "files": [[item.path, item.header_bytes, item.header_digest.hex(), item.bytes] for item in written.files],
        }

    def _check_own(self, folder: Directory) -> None:
        """The files of this rank are durable, and there by their names: so it may say that it is prepared."""
        assert self.written is not None
        if self.job.target.options.durability == "fsync":
            folder.sync()
        check_listed(folder, self.written.files, step=self.job.step)

    async def publish(self, attempt: Attempt, prepared: Mapping[int, Prepared]) -> Mapping[str, Json]:
        job, own, transaction = self.job, self.written, self.transaction
        assert own is not None
        assert transaction is not None
        sent = {rank: Fields(dict(item.notes), owner=f"rank {rank}", where="notes") for rank, item in prepared.items()}
        count = self.ranks.ranks_count
        others = [file for rank in range(1, count) for file in _files(rank, sent[rank])]
        head = transaction.head(
            files=(*own.files, *others),
            values=job.values,
            metadata=job.metadata,
            parents=self.parents,
            ranks_count=count,
        )
        draft = Draft(
            head=head,
            body=own.body,
            digests=own.digests,
            others=[await self._part(rank, sent[rank]) for rank in range(1, count)],
            structures=tuple(sent[rank].optional_text("structure") for rank in range(count)),
        )
        published = await transaction.commit(draft)
        self.manifest_bytes = published.manifest_bytes
        return {"digest": published.parent.digest}

    async def abandon(self, attempt: Attempt) -> None:
        if self.transaction is not None:
            await self.transaction.give_up()

    async def look(self, attempt: Attempt) -> bool:
        return await run_on(committer, is_committed_whole, self.job.target.root.path, attempt)

    def resolve(self, attempt: Attempt) -> bool:
        return is_committed_whole(self.job.target.root.path, attempt)

    def stop(self) -> None:
        self.job.future.native_progress.cancel()

    def committed(self, outcome: Outcome) -> Committed:
        """Return what this rank knows now. One that found the manifest itself begins its next delta's chain anew."""
        assert self.written is not None
        assert outcome.attempt is not None
        if not self.share.is_known:
            self.ranks.replicas.agree(self.share.replicas, self.share.by_peers)
        digest = outcome.notes.get("digest")
        parent = None
        if isinstance(digest, str):
            parent = ParentFacts(step=self.job.step, attempt=outcome.attempt.id, digest=digest)
        return Committed(
            written=self.written,
            parent=parent,
            parents=self.parents,
            manifest_bytes=self.manifest_bytes,
        )

    async def _who_writes(self, sent: Mapping[int, Fields]) -> str:
        """ "share": each what it has captured; "same": as follows from the names; "owners": as is left there."""
        if not who_asks({rank: notes.flag("share", default=False) for rank, notes in sent.items()}):
            return "share"
        check_claims({rank: _claims(notes) for rank, notes in sent.items()})
        digests = {rank: notes.text("replicas") for rank, notes in sent.items()}
        ranks = {digest: rank for rank, digest in digests.items()}
        if len(ranks) == 1:
            return "same"
        lists = {digest: decode_list(await self._get(f"list/{rank}"), rank=rank) for digest, rank in ranks.items()}
        owners = different_owners([lists[digests[rank]] for rank in range(self.ranks.ranks_count)])
        await self._put("owners", dumps(dict(owners)))
        return "owners"

    async def _take_share(self, how: str) -> None:
        """Note what other ranks write of all that was captured."""
        share, replicas = self.share, self.ranks.replicas
        if how == "same":
            share.by_peers = replicas.written_by_peers(
                share.replicas, same_owners(share.replicas, self.ranks.ranks_count)
            )
        elif how == "owners":
            share.by_peers = replicas.written_by_peers(share.replicas, decode_owners(await self._get("owners")))

    async def _part(self, rank: int, notes: Fields) -> PartText:
        text = await self._get(f"part/{rank}")
        if xxhash.xxh3_128_digest(text) != notes.digest("digest"):
            raise CorruptError(f"the part of rank {rank} was damaged on its way")
        return PartText(text=text, features=frozenset(notes.texts("features", count_max=FACTS_MAX)))

    async def _put(self, name: str, data: bytes | bytearray) -> None:
        await run_on(talkers, self.ranks.channel.put, self.share.call, name, bytes(data))

    async def _get(self, name: str) -> bytes:
        return await run_on(talkers, self.ranks.channel.get, self.share.call, name, self.ranks.limits.silence_s)


def _attempt_folder(root: CheckpointRoot, attempt: Attempt) -> Directory:
    try:
        return root.data.child(attempt.directory)
    except NotFoundError as error:
        raise NotFoundError(
            f"folder {attempt.directory!r}, which rank 0 has made for this save, is not there",
            hint="all ranks need the same checkpoint directory, on a file system that they share",
        ) from error


def _common_parents(begins: Mapping[int, Begin], sent: Mapping[int, Fields]) -> Json:
    """What the ranks with a delta build upon, which is the same; ConflictError otherwise."""
    chains = {rank: sent[rank].value("parents") for rank, begin in begins.items() if begin.kind == "delta"}
    if not chains:
        return []
    first = min(chains)
    for rank, chain in chains.items():
        if chain != chains[first]:
            raise ConflictError(
                f"ranks {first} and {rank} build their deltas upon different checkpoints",
                hint="save a full checkpoint: kind='full'",
            )
    return chains[first]


def _claims(notes: Fields) -> dict[str, str]:
    claims = notes.value("claims")
    if type(claims) is not dict or not all(type(claim) is str for claim in claims.values()):
        raise CorruptError(f"{notes.owner} sent parts of tables that are none")
    return claims


def _parents(notes: Fields) -> tuple[ParentFacts, ...]:
    items = notes.items("parents", count_max=FACTS_MAX)
    parents = []
    for item in items:
        if type(item) is not list or [type(part) for part in item] != [int, str, str] or not 0 <= item[0] <= STEP_MAX:
            raise CorruptError("rank 0 sent parents that are none")
        parents.append(ParentFacts(step=item[0], attempt=item[1], digest=item[2]))
    return tuple(parents)


def _files(rank: int, notes: Fields) -> list[FileFacts]:
    """Return the files of another rank, as it has sent them."""
    files = []
    for item in notes.items("files", count_max=FACTS_MAX):
        if type(item) is not list or [type(part) for part in item] != [str, int, str, int]:
            raise CorruptError(f"rank {rank} sent files that are none")
        path, header_bytes, digest, size = item
        files.append(FileFacts(path, rank, header_bytes, bytes.fromhex(digest), size))
    return files
