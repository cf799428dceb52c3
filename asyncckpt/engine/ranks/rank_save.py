"""A save of several ranks, in the background: what this rank does while it talks to the others.

coordination.driver runs the protocol, and calls these effects:

    make_folder   rank 0     sweep; who writes which replica; what a delta builds upon; the attempt's folder
    write         all ranks  filter, write and sync the own files; leave the part of the manifest on the channel
    publish       rank 0     put the parts together, check them, publish: the commit
    abandon       rank 0     remove what an aborted attempt left
    is_committed  all ranks  whether the manifest is there, when no outcome is heard
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import xxhash

from asyncckpt.commit.discover import check_listed
from asyncckpt.commit.doubt import is_committed_whole
from asyncckpt.commit.proof import Draft
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.commit.transaction import Transaction
from asyncckpt.coordination.driver import run_call
from asyncckpt.coordination.messages import AttemptMessage, Begin, Kind, Outcome, Prepared
from asyncckpt.engine.process.background import committer, run_on, talkers, workers
from asyncckpt.engine.process.future import FutureState
from asyncckpt.engine.ranks.replicas import (
    agreement_of,
    check_claims,
    decode_list,
    decode_owners,
    different_owners,
    same_owners,
    who_asks,
)
from asyncckpt.engine.ranks.saver_ranks import Ranks
from asyncckpt.engine.save.save_job import Committed, SaveJob, Written
from asyncckpt.engine.save.state_cut import RankShare
from asyncckpt.engine.save.write_files import write_files
from asyncckpt.errors import ConflictError, CorruptError, IndeterminateError, NotFoundError
from asyncckpt.format.limits import STEP_MAX
from asyncckpt.format.manifest import FileFacts, ParentFacts, PartText, encode_part
from asyncckpt.format.names import Attempt
from asyncckpt.format.strict_json import Fields, Json, dumps
from asyncckpt.storage.directory import Directory

FACTS_MAX = 1_000_000


async def save_with_ranks(job: SaveJob, share: RankShare) -> Committed | Outcome:
    """Take one save of all ranks to its commit; an Outcome when another rank has skipped it."""
    ranks = share.ranks
    save = RankSave(job, share)
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
        return outcome
    return save.committed(outcome)


@dataclass
class RankSave:
    """The effects of one save on this rank. Used in the background's loop only."""

    job: SaveJob
    share: RankShare
    written: Written | None = None
    parents: tuple[ParentFacts, ...] = ()
    transaction: Transaction | None = None
    manifest_bytes: int = 0

    @property
    def ranks(self) -> Ranks:
        return self.share.ranks

    async def leave_list(self) -> None:
        """While it is not known who writes which replica: say which there are here."""
        if not self.share.is_known:
            await self._put(f"list/{self.ranks.rank}", self.share.replicas.encoded())

    def begin(self) -> Begin:
        base = self.job.choice.base
        kind: Kind = "full" if base is None else "delta"
        listed, left_out = self.share.replicas, self.share.left_out
        notes: dict[str, Json] = {"held": listed.digest_with_claims, "agreement": ""}
        if left_out is not None:
            notes["agreement"] = left_out.agreement
        else:
            notes |= {"replicas": listed.digest, "claims": dict(listed.claims)}
        if base is not None:
            notes["parents"] = [[item.step, item.attempt, item.digest] for item in base.chain]
        facts = {"durability": self.job.target.options.durability}
        return Begin(step=self.job.step, kind=kind, facts=facts, notes=notes)

    async def make_folder(self, begins: Mapping[int, Begin]) -> tuple[Attempt, Mapping[str, Json]]:
        job = self.job
        sent = {rank: _notes(begin.notes, rank) for rank, begin in begins.items()}
        notes = {"parents": _common_parents(begins, sent), **await self._who_writes(sent)}
        self.transaction = await run_on(committer, Transaction.begin, job.target.commits, job.claim)
        return self.transaction.attempt, notes

    async def write(self, attempt: AttemptMessage) -> Mapping[str, Json]:
        job = self.job
        notes = _notes(attempt.notes, 0)
        self.parents = _parents(notes) if attempt.kind == "delta" else ()
        await self._take_share(notes.text("replicas"), notes.text("agreement"))
        own = self.transaction  # Of rank 0: it has the folder open, and checks all files before it publishes.
        with _attempt_folder(job.target.root, attempt.attempt) if own is None else nullcontext(own.folder) as folder:
            self.written = written = await run_on(workers, write_files, job, folder, attempt.attempt)
            if own is None:
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
        """Make sure that the files of this rank are durable, and there by their names, before it is prepared."""
        assert self.written is not None
        if self.job.target.options.durability == "fsync":
            folder.sync()
        check_listed(folder, self.written.files, step=self.job.step)

    async def publish(self, attempt: Attempt, prepared: Mapping[int, Prepared]) -> Mapping[str, Json]:
        job, own, transaction = self.job, self.written, self.transaction
        assert own is not None
        assert transaction is not None
        sent = {rank: _notes(item.notes, rank) for rank, item in prepared.items()}
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

    def is_committed(self, attempt: Attempt) -> bool:
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
        parent = ParentFacts(self.job.step, outcome.attempt.id, digest) if isinstance(digest, str) else None
        return Committed(self.written, parent, self.parents, self.manifest_bytes)

    async def _who_writes(self, sent: Mapping[int, Fields]) -> dict[str, Json]:
        """ "share": each what it has captured; "same": as follows from the names; "owners": as is left there."""
        replicas = self.ranks.replicas
        agreement = agreement_of([sent[rank].text("held") for rank in range(self.ranks.ranks_count)])
        known = {rank: notes.text("agreement") for rank, notes in sent.items()}
        how = "share"
        if who_asks(known, agreement=agreement, decided=replicas.decided[0]):
            if replicas.decided[0] != agreement:
                replicas.decided = agreement, await self._decide_owners(sent)
            owners = replicas.decided[1]
            how = "same" if owners is None else "owners"
            if owners is not None:
                await self._put("owners", owners)
        return {"replicas": how, "agreement": agreement}

    async def _decide_owners(self, sent: Mapping[int, Fields]) -> bytes | None:
        """Return who writes what, encoded; None where it follows from the lists, which are the same. All ranks ask."""
        check_claims({rank: _claims(notes) for rank, notes in sent.items()})
        digests = {rank: notes.text("replicas") for rank, notes in sent.items()}
        ranks = {digest: rank for rank, digest in digests.items()}
        if len(ranks) == 1:
            return None
        lists = {digest: decode_list(await self._get(f"list/{rank}"), rank=rank) for digest, rank in ranks.items()}
        return dumps(different_owners([lists[digests[rank]] for rank in range(self.ranks.ranks_count)]))

    async def _take_share(self, how: str, agreement: str) -> None:
        """Note what other ranks write of all that was captured."""
        share = self.share
        if share.is_known or how == "share":
            return
        same = how == "same"
        owners = (
            same_owners(share.replicas, self.ranks.ranks_count) if same else decode_owners(await self._get("owners"))
        )
        share.by_peers = self.ranks.replicas.written_by_peers(share.replicas, owners, agreement)

    async def _part(self, rank: int, notes: Fields) -> PartText:
        text = await self._get(f"part/{rank}")
        if xxhash.xxh3_128_digest(text) != notes.digest("digest"):
            raise CorruptError(f"the part of rank {rank} was damaged on its way")
        return PartText(text=text, features=frozenset(notes.texts("features", count_max=FACTS_MAX)))

    async def _put(self, name: str, data: bytes | bytearray) -> None:
        await run_on(talkers, self.ranks.channel.put, self.share.call, name, bytes(data))

    async def _get(self, name: str) -> bytes:
        return await run_on(talkers, self.ranks.channel.get, self.share.call, name, self.ranks.limits.silence_s)


def _notes(notes: Mapping[str, Json], rank: int) -> Fields:
    return Fields(dict(notes), owner=f"rank {rank}", where="notes")


@contextmanager
def _attempt_folder(root: CheckpointRoot, attempt: Attempt) -> Iterator[Directory]:
    """Open the folder of an attempt; NotFoundError when it is not there, or is gone when files in it are missed."""
    try:
        with root.data.child(attempt.directory) as folder:
            yield folder
    except (CorruptError, NotFoundError) as error:
        if root.data.exists(attempt.directory):
            raise
        raise NotFoundError(
            f"folder {attempt.directory!r}, which rank 0 has made for this save, is not there",
            hint="unless rank 0 has aborted the save: all ranks need one directory, on a file system that they share",
        ) from error


def _common_parents(begins: Mapping[int, Begin], sent: Mapping[int, Fields]) -> Json:
    """Return what the ranks with a delta build upon, which is the same; ConflictError otherwise."""
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
    for item in items:
        if type(item) is not list or [type(part) for part in item] != [int, str, str] or not 0 <= item[0] <= STEP_MAX:
            raise CorruptError("rank 0 sent parents that are none")
    return tuple(ParentFacts(*item) for item in items)


def _files(rank: int, notes: Fields) -> list[FileFacts]:
    """Return the files of another rank, as it has sent them."""
    files = []
    for item in notes.items("files", count_max=FACTS_MAX):
        if type(item) is not list or [type(part) for part in item] != [str, int, str, int]:
            raise CorruptError(f"rank {rank} sent files that are none")
        path, header_bytes, digest, size = item
        files.append(FileFacts(path, rank, header_bytes, bytes.fromhex(digest), size))
    return files
