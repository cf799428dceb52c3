"""A save of several ranks, in the background: what this rank does while it talks to the others.

coordination.driver runs the protocol, and calls these effects:

    make_folder   rank 0     whether ranks hold the same replicas, and who writes which; the base of a delta; the
                             attempt's folder
    write         all ranks  filter, write and sync the own files; leave the part of the manifest on the channel
    publish       rank 0     put the parts together, check them, publish: the commit
    abandon       rank 0     remove what an aborted attempt left
    is_committed  all ranks  whether the manifest is there, when no outcome is heard
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field

import xxhash

from asyncckpt.commit.attempt import Draft, claims
from asyncckpt.commit.discover import check_listed
from asyncckpt.commit.doubt import is_committed_whole
from asyncckpt.commit.root import CheckpointRoot, WriteRoot
from asyncckpt.commit.transaction import Transaction
from asyncckpt.coordination.actions import Contradiction
from asyncckpt.coordination.driver import run_call
from asyncckpt.coordination.messages import AttemptMessage, Begin, Failed, Kind, Outcome, Prepared, cause_of, malformed
from asyncckpt.engine.features.deltas import settle
from asyncckpt.engine.process.background import committer, run_on, talkers, workers
from asyncckpt.engine.ranks.holdings import check_ids_held, decode_ids_held, decode_slices, encode_ids_held
from asyncckpt.engine.ranks.rank_share import RankShare, share_of
from asyncckpt.engine.ranks.replica_contents import check_contents, contents_of, decode_contents
from asyncckpt.engine.ranks.replicas import decode_list, decode_owners
from asyncckpt.engine.ranks.saver_ranks import Ranks
from asyncckpt.engine.ranks.writers import Decision, Held, agreement_of, same_owners
from asyncckpt.engine.save.save_job import Committed, SaveJob, SkippedByPeer, Written
from asyncckpt.engine.save.write_files import write_files
from asyncckpt.errors import (
    CheckpointError,
    ConflictError,
    CorruptError,
    IndeterminateError,
    IOFailedError,
    NotFoundError,
    PeerError,
)
from asyncckpt.format.head import FileFacts, ParentFacts
from asyncckpt.format.limits import STEP_MAX
from asyncckpt.format.names import Attempt, manifest_name
from asyncckpt.format.strict_json import Fields, Json, dumps
from asyncckpt.format.write_manifest import PartText, encode_part
from asyncckpt.storage.directory import Directory
from asyncckpt.storage.store_folder import StoreFolder

FACTS_MAX = 1_000_000


async def save_with_ranks(job: SaveJob) -> Committed | SkippedByPeer:
    """Take one save of all ranks to its commit, unless another rank has skipped it."""
    share, where = share_of(job), job.target.root.path
    ranks = share.ranks
    save = RankSave(job, share)
    refused: CheckpointError | None = None
    try:
        try:
            save.settle_base()
            await save.leave_list()
        except CheckpointError as error:
            refused = error
        begin = save.begin() if refused is None else Failed(cause_of(refused))
        outcome = await run_call(ranks.channel, share.call, begin, save, ranks.limits, threads=talkers, where=where)
        if refused is not None:
            raise refused
    except BaseException as error:
        ranks.replicas.forget()
        if isinstance(error, (ConflictError, PeerError)):
            with suppress(CheckpointError):  # Rank 0 has looked, and all ranks need the same next step.
                await run_on(committer, job.target.root.look_anew)
        if isinstance(error, IndeterminateError) or await save.is_base_lost(error):
            job.target.memory.newest = None  # The next save is a full one, on all ranks.
        raise
    finally:
        if save.transaction is not None:
            await save.transaction.give_up()
    if outcome.state != "committed":
        return SkippedByPeer(outcome.rank, outcome.cause)
    return save.committed(outcome)


@dataclass
class RankSave:
    """The effects of one save on this rank. Used in the background's loop only.

    is_agreed: which rank writes what holds for later saves too. contents: the name of what is in the replicas, where
    all of them have been captured. stopped: the call has ended without what this rank writes.
    """

    job: SaveJob
    share: RankShare
    is_agreed: bool = True
    contents: str = ""
    written: Written | None = None
    parents: tuple[ParentFacts, ...] = ()
    transaction: Transaction | None = None
    manifest_bytes: int = 0
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ranks(self) -> Ranks:
        return self.share.ranks

    def settle_base(self) -> None:
        """Choose the base of a delta. All saves before this one have ended, so all ranks choose the same."""
        if self.job.base is None and self.job.call.kind != "delta":
            return  # It is a full one.
        settle(self.job)
        assert self.job.base is not None
        self.job.claim.parents[:] = [self.job.base.parent.step]

    async def leave_list(self) -> None:
        """While it is not known who writes which replica: say which there are here, and what is in them."""
        if not self.share.is_known:
            await self._put(f"list/{self.ranks.rank}", self.share.replicas.encoded())
            contents = await run_on(workers, contents_of, self.job, self.share.replicas)
            self.contents = contents.name(self.ranks.rank)
            await self._put(f"contents/{self.ranks.rank}", contents.encoded())

    def begin(self) -> Begin:
        base = self.job.base
        kind: Kind = "full" if base is None else "delta"
        listed, left_out = self.share.replicas, self.share.left_out
        notes: dict[str, Json] = {"held": listed.digest_with_slices, "agreement": ""}
        notes |= {"ids": encode_ids_held(self.share.ids_held), "contents": self.contents}
        if left_out is not None:
            notes["agreement"] = left_out.agreement
        else:
            notes |= {"replicas": listed.digest, "slices": listed.encoded_slices()}
        if base is not None:
            notes["parents"] = [[item.step, item.attempt, item.digest] for item in base.chain]
        facts: dict[str, str] = {"durability": self.job.target.options.durability}
        if self.job.claim.is_next:
            facts["step"] = "the next one"
        return Begin(step=self.job.step, kind=kind, facts=facts, notes=notes)

    async def make_folder(self, begins: Mapping[int, Begin]) -> tuple[Attempt, Mapping[str, Json]]:
        job = self.job
        sent = {rank: _notes(begin.notes, rank) for rank, begin in begins.items()}
        try:
            notes = {"parents": await self._parents_now(begins, sent), **await self._who_writes(sent)}
            await self._check_replicas(sent)
        except ConflictError as error:
            raise Contradiction(str(error)) from error
        await self._claim_step(min(begin.step for begin in begins.values()))
        self.transaction = await run_on(committer, Transaction.begin, job.target.commits, job.claim, job.recorder)
        return self.transaction.attempt, notes

    async def write(self, attempt: AttemptMessage) -> Mapping[str, Json]:
        job = self.job
        await self._claim_step(attempt.attempt.step)
        notes = _notes(attempt.notes, 0)
        self.parents = _parents(notes) if attempt.kind == "delta" else ()
        await self._take_share(notes.text("replicas"), notes.text("agreement"))
        own = self.transaction  # Of rank 0: it has the folder open, and checks all files before it publishes.
        opened = _attempt_folder(job.target.root, attempt.attempt) if own is None else nullcontext(own.place)
        try:
            with opened as folder:
                self.written = written = await run_on(workers, write_files, job, folder, attempt.attempt)
                if own is None:
                    await run_on(committer, self._check_own, folder)
        except NotFoundError:  # Rank 0 may have aborted the save: its word, which says why, ends this.
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.stopped.wait(), self.ranks.limits.alive_s)
            raise
        await job.begin_commit()
        own_notes: dict[str, Json] = {"structure": written.structure, "holds_all": written.holds_all}
        if self.ranks.is_coordinator:
            return own_notes
        part = encode_part(written.files, job.values, written.body, written.digests)
        await self._put(f"part/{self.ranks.rank}", part.text)
        return own_notes | {
            "digest": xxhash.xxh3_128_hexdigest(part.text),
            "features": sorted(part.features),
            "files": [[item.path, item.header_bytes, item.header_digest.hex(), item.bytes] for item in written.files],
        }

    async def _claim_step(self, step: int) -> None:
        """Claim the step that all save: the lowest that any rank found to be the next one.

        They differ when a save has failed after some ranks had made the next call, and before others did. On every
        rank the numbers ascend from call to call, and so does the lowest.
        """
        job = self.job
        if step == job.step:
            return
        claim = await run_on(committer, claims.save, job.target.root, step)
        claim.parents[:] = job.claim.parents
        job.claim.release()
        job.claim, job.ticket.step, job.future.step = claim, step, step
        if job.recorder is not None:
            job.recorder.step = step

    def _check_own(self, folder: Directory | StoreFolder) -> None:
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
            metadata=job.call.metadata,
            parents=self.parents,
            ranks_count=count,
            times=job.times(),
        )
        draft = Draft(
            head=head,
            body=own.body,
            digests=own.digests,
            others=[await self._part(rank, sent[rank]) for rank in range(1, count)],
            structures=tuple(sent[rank].optional_text("structure") for rank in range(count)),
            holds_all=all(notes.flag("holds_all", default=False) for notes in sent.values()),
        )
        published = await transaction.commit(draft, job.recorder)
        self.manifest_bytes = published.manifest_bytes
        return {"digest": published.parent.digest}

    async def abandon(self, attempt: Attempt) -> None:
        if self.transaction is not None:
            await self.transaction.give_up()

    def is_committed(self, attempt: Attempt) -> bool:
        return is_committed_whole(self.job.target.root.path, attempt)

    async def is_base_lost(self, error: BaseException) -> bool:
        """Return whether a delta has failed because others have removed its base. Every rank looks."""
        base, commits = self.job.base, self.job.target.commits
        if base is None or not isinstance(error, (ConflictError, PeerError)):
            return False
        return not await run_on(committer, commits.chain.is_there, base.chain)

    def stop(self) -> None:
        self.stopped.set()
        self.job.future.native_progress.cancel()

    def committed(self, outcome: Outcome) -> Committed:
        """Return what this rank knows now. One that found the manifest itself begins a new chain with its next save."""
        assert self.written is not None
        assert outcome.attempt is not None
        if not self.is_agreed:
            self.ranks.replicas.forget()
        elif not self.share.is_known:
            self.ranks.replicas.agree(self.share.replicas, self.share.by_peers)
        self.job.target.root.note(manifest_name(self.job.step))
        digest = outcome.notes.get("digest")
        parent = ParentFacts(self.job.step, outcome.attempt.id, digest) if isinstance(digest, str) else None
        return Committed(self.written, outcome.attempt, parent, self.parents, self.manifest_bytes)

    async def _parents_now(self, begins: Mapping[int, Begin], sent: Mapping[int, Fields]) -> Json:
        """Return the parents of what all ranks save together; ConflictError when they are not there any more."""
        parents = _common_parents(begins, sent)
        if parents:
            needed = await run_on(committer, self.job.target.commits.chain.look, parents)
            parents = parents[: len(needed)]
        return [[item.step, item.attempt, item.digest] for item in parents]

    async def _who_writes(self, sent: Mapping[int, Fields]) -> dict[str, Json]:
        """ "share": each what it has captured; "same": as follows from the names; "owners": as is left there.

        agreement: what it is called; "": it is for this save only.
        """
        decisions = self.ranks.decisions
        agreement = agreement_of([sent[rank].text("held") for rank in range(self.ranks.ranks_count)])
        captured_by = {rank: name for rank, notes in sent.items() if (name := notes.text("agreement"))}
        is_as_agreed = set(captured_by.values()) <= {agreement}
        if is_as_agreed and len(captured_by) == len(sent):
            return {"replicas": "share", "agreement": agreement}
        decision = decisions.find(agreement) if is_as_agreed else None
        if decision is None:
            decision = await self._decide(sent, captured_by)
            if captured_by:
                agreement = ""
            else:
                decisions.add(agreement, decision)
        if not decision.is_same:
            await self._put("owners", dumps(dict(decision.owners)))
        return {"replicas": "same" if decision.is_same else "owners", "agreement": agreement}

    async def _decide(self, sent: Mapping[int, Fields], captured_by: Mapping[int, str]) -> Decision:
        """Decide who writes what. The lists of ranks that have captured everything are on the channel."""
        decisions, own = self.ranks.decisions, self.share.replicas
        lists = {own.digest: own.items}
        held = []
        for rank, notes in sorted(sent.items()):
            if rank in captured_by:
                held.append(decisions.holder(rank, captured_by[rank]))
                continue
            digest = notes.text("replicas")
            if digest not in lists:
                lists[digest] = tuple(decode_list(await self._get(f"list/{rank}"), rank=rank))
            held.append(Held(lists[digest], decode_slices(notes.value("slices"), owner=notes.owner)))
        return decisions.decide(held, captured_by, is_same=not captured_by and len(lists) == 1)

    async def _check_replicas(self, sent: Mapping[int, Fields]) -> None:
        """Raise ConflictError when ranks hold different replicas."""
        check_ids_held({rank: decode_ids_held(notes.value("ids"), owner=notes.owner) for rank, notes in sent.items()})
        first: dict[str, int] = {}
        for rank, notes in sorted(sent.items()):
            first.setdefault(notes.text("contents"), rank)
        first.pop("", None)
        if len(first) > 1:  # Perhaps because some ranks hold other tensors.
            texts = {rank: await self._get(f"contents/{rank}") for rank in first.values()}
            check_contents({rank: decode_contents(text, rank=rank) for rank, text in texts.items()})

    async def _take_share(self, how: str, agreement: str) -> None:
        """Note what other ranks write of all that was captured."""
        share, replicas = self.share, self.ranks.replicas
        self.is_agreed = bool(agreement)
        if how == "share" or (share.left_out is not None and share.left_out.agreement == agreement):
            return
        if how == "same":
            owners = same_owners(share.replicas.items, self.ranks.ranks_count)
        else:
            owners = decode_owners(await self._get("owners"))
        share.take(self.job, replicas.written_by_peers(share.replicas, owners, agreement))

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
def _attempt_folder(root: WriteRoot, attempt: Attempt) -> Iterator[Directory | StoreFolder]:
    """Open the folder of an attempt; NotFoundError when it is not there, or is gone when work in it fails."""
    try:
        with root.data.child(attempt.directory) as folder:
            yield folder
    except (CorruptError, IOFailedError, NotFoundError) as error:
        in_store = not isinstance(root, CheckpointRoot)  # Where objects go one by one.
        if isinstance(error, IOFailedError) if in_store else root.data.exists(attempt.directory):
            raise
        raise NotFoundError(
            f"this rank does not see folder {attempt.directory!r}, which rank 0 has made for this save",
            hint="unless rank 0 has aborted the save: all ranks need one directory, on a file system that they share",
        ) from error


def _common_parents(begins: Mapping[int, Begin], sent: Mapping[int, Fields]) -> tuple[ParentFacts, ...]:
    """Return the bases of the ranks with a delta, which are the same; ConflictError otherwise. A rank that called when
    some of them were compacted lists fewer."""
    chains = {rank: _parents(sent[rank]) for rank, begin in begins.items() if begin.kind == "delta"}
    longest = max(chains, key=lambda rank: len(chains[rank]), default=0)
    for rank, chain in chains.items():
        if not chain or chain != chains[longest][: len(chain)]:
            raise ConflictError(
                f"ranks {rank} and {longest} base their deltas on different checkpoints",
                hint="save a full checkpoint: kind='full'",
            )
    return chains.get(longest, ())


def _parents(notes: Fields) -> tuple[ParentFacts, ...]:
    items = notes.items("parents", count_max=FACTS_MAX)
    for item in items:
        if type(item) is not list or [type(part) for part in item] != [int, str, str] or not 0 <= item[0] <= STEP_MAX:
            raise malformed(notes.owner, "parents")
    return tuple(ParentFacts(*item) for item in items)


def _files(rank: int, notes: Fields) -> list[FileFacts]:
    """Return the files of another rank, as it has sent them."""
    files = []
    for item in notes.items("files", count_max=FACTS_MAX):
        if type(item) is not list or [type(part) for part in item] != [str, int, str, int]:
            raise malformed(f"rank {rank}", "files")
        path, header_bytes, digest, size = item
        files.append(FileFacts(path, rank, header_bytes, bytes.fromhex(digest), size))
    return files
