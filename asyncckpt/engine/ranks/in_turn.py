"""Ranks that are Savers of one process, which save a step one after the other: RankOptions(in_turn=True).

1. The first call for a step claims it. Every later one is for the same step, which is then claimed already.
2. In the background, each save compares what it holds with the parts before it, as rank 0 does for ranks that save at
   the same time (rank_save.py), writes its files into the folder of the one attempt, except replicas that an earlier
   part has, and leaves its part here.
3. The last one proves the manifest of all parts, and publishes it: the commit.

A step is given up, and nothing of it committed, when a part fails, at the end of the interpreter, and when a rank calls
that has saved its part of it, or wants another step: then that call says whose parts have not come.

The directory stays open, and locked, while parts are missing, whichever Savers are closed meanwhile. A crash leaves a
folder that the next save sweeps. A store has no lock, and nothing is swept; each Saver knows of its own what is there,
so all whose parts have come hear of the commit.
"""

from __future__ import annotations

import atexit
import sys
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.commit.attempt import Claim, Draft, claims
from asyncckpt.commit.doubt import InDoubt, settle
from asyncckpt.commit.root import WriteRoot
from asyncckpt.commit.transaction import Transaction
from asyncckpt.coordination.messages import cause_of
from asyncckpt.engine.process.background import committer, run_on, workers
from asyncckpt.engine.process.held_directory import Opened, commits_of, open_alone
from asyncckpt.engine.ranks.rank_share import RankShare, share_of
from asyncckpt.engine.ranks.replica_contents import Contents, check_contents, contents_of
from asyncckpt.engine.ranks.saver_ranks import Ranks
from asyncckpt.engine.ranks.writers import Decisions, Held
from asyncckpt.engine.save.save_job import Committed, SaveJob, SaveTarget, Written
from asyncckpt.engine.save.write_files import write_files
from asyncckpt.errors import PeerError
from asyncckpt.format.names import manifest_name
from asyncckpt.format.strict_json import Json
from asyncckpt.format.write_manifest import encode_part
from asyncckpt.system import register_at_fork

RANKS_SHOWN_MAX = 8
_NOTHING_HELD = Held((), {})


@dataclass(frozen=True)
class _Part:
    """What one rank has written, and what it holds."""

    written: Written
    values: tuple[Json, ...]
    metadata: Json
    held: Held
    contents: Contents


@dataclass(eq=False)
class StepInTurn:
    """A step of which some ranks have saved their part.

    running: ranks whose save has been called and has not ended. writers: which rank has written a replica. targets:
    those of the Savers. over: why no part is taken any more; None while some are missing.
    """

    claim: Claim
    ranks_count: int
    running: set[int] = field(default_factory=set)
    parts: dict[int, _Part] = field(default_factory=dict)
    writers: dict[str, int] = field(default_factory=dict)
    targets: list[SaveTarget] = field(default_factory=list)
    over: str | None = None
    _opened: Opened | None = None
    _transaction: Transaction | None = None

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.ranks_count) if rank not in self.parts)

    @property
    def awaited(self) -> tuple[int, ...]:
        """The ranks that have not called."""
        return tuple(rank for rank in self.missing if rank not in self.running)

    def not_come(self, hint: str = "save all parts of the step again") -> PeerError:
        """Return the error that says whose parts have not come."""
        missing = self.awaited
        shown = ", ".join(map(str, missing[:RANKS_SHOWN_MAX])) + (" and more" if len(missing) > RANKS_SHOWN_MAX else "")
        where = f" of {str(self.targets[0].root.path)!r}" if self.targets else ""
        return PeerError(
            f"step {self.claim.step}{where} was not committed",
            rank=missing[0],
            cause=f"{len(missing)} of {self.ranks_count} ranks have not saved their parts: {shown}",
            hint=hint,
        )

    def give_up(self, why: str) -> None:
        """Take no more parts, and commit none, when those that run have ended. Idempotent."""
        if self.over is None:
            self.over = why
        if _steps.get(self.claim.place) is self:
            _steps.pop(self.claim.place, None)
        self._close_if_over()

    def end(self, rank: int) -> None:
        """Note that the save of a part has ended. Idempotent."""
        self.running.discard(rank)
        if self.over is None and rank not in self.parts:  # Its call has failed, and may be made again.
            is_begun = bool(self.parts or self.running)
            if not is_begun or _steps.setdefault(self.claim.place, self) is not self:
                self.give_up(f"rank {rank} could not save its part")
        self._close_if_over()

    def _close_if_over(self) -> None:
        if self.over is None or self.running:
            return
        if self._transaction is not None:
            self._transaction.close()
        self.claim.release()
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    async def save(self, job: SaveJob, share: RankShare) -> Committed:
        """Save the part of one rank, and commit with the last one."""
        rank = share.ranks.rank
        self._check_goes_on(rank)
        contents = await run_on(workers, contents_of, job, share.replicas)
        held = Held(share.replicas.items, share.replicas.slices)
        self._check(rank, held, contents)
        owners = {item.path: self.writers.get(item.path, rank) for item in held.items}
        share.take(job, share.ranks.replicas.written_by_peers(share.replicas, owners, ""))
        transaction = await run_on(committer, self._begun, job)
        written = await run_on(workers, write_files, job, transaction.place, transaction.attempt)
        self._check_goes_on(rank)
        await job.begin_commit()
        self.writers.update(owners)
        self.targets.append(job.target)
        self.parts[rank] = _Part(written, job.values, job.call.metadata, held, contents)
        self.claim.missing[:] = self.missing
        if self.missing:
            return Committed(written, transaction.attempt, None, (), waits_for=self.missing)
        self.over = "all parts have come"
        published = await transaction.commit(self._draft(transaction), job.recorder)
        self._note()
        return Committed(written, transaction.attempt, None, (), published.manifest_bytes)

    def _note(self) -> None:
        for target in self.targets:
            target.root.note(manifest_name(self.claim.step))

    def note_in_doubt(self, error: InDoubt) -> None:
        """Let each Saver whose part has come settle it at its next save, or refuse that."""
        self._note()
        for target in self.targets:
            target.commits.in_doubt.append(error)

    def _check_goes_on(self, rank: int) -> None:
        if self.over is not None:
            what = f"step {self.claim.step} was given up before the part of rank {rank} was saved"
            raise PeerError(what, rank=None, cause=self.over)

    def _check(self, rank: int, held: Held, contents: Contents) -> None:
        """Raise ConflictError when this rank holds other replicas than those before it, or the same ids."""
        parts = self.parts.items()
        by_rank = {rank: held, **{number: part.held for number, part in parts}}
        listed = [by_rank.get(n, _NOTHING_HELD) for n in range(self.ranks_count)]
        Decisions().decide(listed, {}, is_same=False, are_all=len(by_rank) == self.ranks_count)
        check_contents({**{number: part.contents for number, part in parts}, rank: contents})

    def _begun(self, job: SaveJob) -> Transaction:
        """Return the transaction; the first part begins it, in a directory of its own. On a commit thread."""
        settle(job.target.commits.in_doubt)
        if self._transaction is None:
            self._opened = open_alone(job.target.root.path)
            commits = commits_of(self._opened.root, self._opened.lock, job.target.options.durability)
            self._transaction = Transaction.begin(commits, self.claim, job.recorder)
        return self._transaction

    def _draft(self, transaction: Transaction) -> Draft:
        parts = [self.parts[rank] for rank in range(self.ranks_count)]
        first, others = parts[0], parts[1:]
        head = transaction.head(
            files=tuple(file for part in parts for file in part.written.files),
            values=first.values,
            metadata=first.metadata,
            ranks_count=self.ranks_count,
        )
        texts = [encode_part(it.written.files, it.values, it.written.body, it.written.digests) for it in others]
        structures = tuple(part.written.structure for part in parts)
        return Draft(
            head,
            first.written.body,
            first.written.digests,
            others=texts,
            structures=structures,
            holds_all=all(part.written.holds_all for part in parts),
        )


@dataclass(frozen=True)
class _PartOfClaim(Claim):
    """The claim of a step, as the save of one part has it: releasing it ends that save, not the step."""

    turn: StepInTurn = field(kw_only=True)
    rank: int = field(kw_only=True)

    def release(self) -> None:
        self.turn.end(self.rank)


# Those that wait for calls, by the identity of their directories.
_steps: dict[tuple[Any, ...], StepInTurn] = {}


def claim_in_turn(ranks: Ranks, root: WriteRoot, step: int | None) -> Claim:
    """Claim a step, or the one of which parts are missing, for the part of this rank.

    PeerError when that one waits for other ranks than this: it is given up. ConflictError, UsageError as of any claim.
    """
    turn = _steps.get(root.root.identity)
    if turn is None:
        claim = claims.save(root, step)
        turn = _steps[claim.place] = StepInTurn(claim, ranks.ranks_count)
    is_same = step in (None, turn.claim.step) and ranks.ranks_count == turn.ranks_count
    if not is_same or ranks.rank not in turn.awaited:
        error = turn.not_come(hint="this call has saved nothing: make it again, or save all parts of that step again")
        turn.give_up(cause_of(error))
        raise error
    turn.running.add(ranks.rank)
    if not turn.awaited:
        _steps.pop(turn.claim.place, None)  # A part that fails meanwhile has taken it out.
    return _PartOfClaim(
        turn.claim.place, "save", turn.claim.attempt, is_next=turn.claim.is_next, turn=turn, rank=ranks.rank
    )


async def save_in_turn(job: SaveJob) -> Committed:
    """Save the part of one rank. A failure gives the step up."""
    assert isinstance(job.claim, _PartOfClaim)
    turn = job.claim.turn
    try:
        return await turn.save(job, share_of(job))
    except BaseException as error:
        turn.give_up(cause_of(error))
        if isinstance(error, InDoubt):  # Of this step: not of an earlier one that the store has not answered for yet.
            turn.note_in_doubt(error)
        raise


def _give_up_all() -> None:
    for turn in list(_steps.values()):
        print(f"asyncckpt: {turn.not_come()}", file=sys.stderr)
        turn.give_up("the interpreter has ended")


atexit.register(_give_up_all)
register_at_fork(after_in_child=_steps.clear)
