"""The one way in which a checkpoint comes to be: all writers go through a Transaction, and nobody else renames.

A checkpoint exists from the moment its manifest has its final name; before that, readers do not see it.

1. `begin`: look whether the directory is where it was; sweep what failed saves left (not for a compaction); make
   data/<step>-<attempt>/ and sync data/. The shard room writes and syncs files in it, on whichever rank; other ranks
   look at their own files before they say that they are prepared.
2. `commit` encodes the manifest and proves that readers will accept it (attempt.py).
3. It syncs the attempt's folder, so that the names of the files are durable; writes manifests/.m-<attempt>, syncs it.
4. It proves the rest right before the rename: directory, folders and the LOCK are where they were; every file is there
   by its name with its size, and one that this process wrote is the very same file; the bases of a delta are there;
   nobody is about to remove any of it (removal.py); what a compacted one replaces is the manifest that was read.
5. It marks the attempt for upload, where that is wanted, and renames the manifest to manifests/<step>.json,
   refusing to replace. This is the commit. A compacted checkpoint, which stands for one that is there, gets the name
   manifests/<step>.full.json.
6. It syncs manifests/, or in a store reads the manifest back: durable.
7. It looks at folder and files once more: a writer without a working lock, or a cleaner, may have removed them between
   4 and 5. Only now is the save acknowledged.

An error before 5, or a crash, leaves no checkpoint: the attempt is abandoned, and what stays of it is swept later. An
error from 5 on is an InDoubt, never a plain failure; nothing is removed, and until the directory is opened again
nothing more is committed. A sync that failed is never tried again on the same file (doubt.py). In a store the next
`begin` publishes the manifest again, replacing nothing: then the checkpoint is there, or another one of its step.

#   from        to          done by
#   begun       committing  commit
#   begun       abandoned   close
#   committing  committed   commit
#   committing  abandoned   commit, after an error before the rename
#   committing  in doubt    commit, after an error later
#   in doubt    committed   in a store, the next `begin`
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import aiofiles.threadpool  # noqa: F401  # For commit/root.py: the first save imports nothing.

from asyncckpt.commit.attempt import Claim, Draft, claims, encode_proven, step_exists
from asyncckpt.commit.discover import KnownHeads, being_removed, find_leftovers, read_manifest
from asyncckpt.commit.doubt import InDoubt, check_may_be_settled, find_manifest, forget_after, settle
from asyncckpt.commit.root import Publication, WriteRoot, folder_removed
from asyncckpt.errors import CheckpointError, ConflictError, CorruptError, IndeterminateError, NotFoundError
from asyncckpt.format.head import CREATED_FORMAT, ManifestHead, ParentFacts, SealedHead
from asyncckpt.format.names import Attempt, compacted_manifest_name, manifest_name, upload_mark_name
from asyncckpt.format.write_manifest import written_digest
from asyncckpt.options import KeepPolicy
from asyncckpt.storage.owner_lock import OwnerLock
from asyncckpt.version import __version__

if TYPE_CHECKING:
    from asyncckpt.commit.chain import KnownChain
    from asyncckpt.model.event import Recorder

WRITER = f"asyncckpt {__version__}"

T = TypeVar("T")


class Uploader(Protocol):
    """Copies what is committed somewhere else."""

    def upload(self, attempt: Attempt) -> None:
        """Take note that there is an attempt to copy. Never raises, and does not wait."""
        ...


@dataclass(frozen=True)
class Commits:
    """What all transactions of one writer have in common.

    lock: its share in the directory's LOCK; None where another process holds it. threads: on which blocking calls of a
    commit run; nothing else may wait there. warn: called for leftovers that stay. uploader: where commits are copied
    to. remembers: whether heads of what is committed are kept, for deltas and retention. said: what stays, and why.
    """

    root: WriteRoot
    lock: OwnerLock | None
    durable: bool
    threads: Executor
    warn: Callable[..., None]
    uploader: Uploader | None = None
    remembers: bool = True
    in_doubt: list[IndeterminateError] = field(default_factory=list)
    said: dict[str, list[str]] = field(default_factory=dict)

    @cached_property
    def heads(self) -> KnownHeads:
        return KnownHeads(self.root)

    @cached_property
    def chain(self) -> KnownChain:
        from asyncckpt.commit.chain import KnownChain  # Deltas load it.

        return KnownChain(self.root, self.heads)

    def retain(self, policy: KeepPolicy, *, protected: Callable[[], Collection[int]]) -> None:
        """Let all go that is not kept. Never raises: the new checkpoint is committed. Says once what is in its way."""
        try:
            from asyncckpt.commit.retention import retain  # A Saver that keeps all does not load it.

            damaged = retain(self.root, self.heads, policy, protected=protected).damaged
            found = [f"step {step}, which cannot be used or counted: {why}" for step, why in damaged.items()]
        except Exception as error:
            found = [str(error)]
        self._say("old checkpoints", found)

    def sweep(self) -> None:
        """Remove leftovers. What cannot be swept is in nobody's way."""
        found: list[str] = []
        try:
            left = find_leftovers(self.root, self.heads, claims.held)
            if left.folders or left.temporaries or left.uploads or left.pins:
                from asyncckpt.commit.removal import remove_leftovers  # Usually there are none.

                remove_leftovers(self.root, self.heads, left, keep_attempts=claims.held)
        except (CheckpointError, ImportError, OSError) as error:  # No file can be opened, also none of the package.
            found.append(str(error))
        if found or self.said:
            self._say("leftovers", found)

    def _say(self, what: str, why: list[str]) -> None:
        """Warn of what stays, but not of what was so the last time."""
        for text in why:
            if text not in self.said.get(what, ()):
                self.warn("%s in %s were kept: %s", what, self.root.path, text)
        self.said[what] = why

    def check_not_in_doubt(self) -> None:
        """Refuse to commit after a commit whose durability is unknown, until the directory is opened again.

        One that the next `begin` can settle does not count.
        """
        if self.in_doubt:
            check_may_be_settled(self.in_doubt)


@dataclass(frozen=True)
class Published:
    """A durable checkpoint: as a parent of others, and the bytes of its manifest."""

    parent: ParentFacts
    manifest_bytes: int


class Transaction:
    """One attempt at a claimed step; see above. Close it, in any case; the claim stays the caller's."""

    def __init__(self, commits: Commits, claim: Claim, publication: Publication, *, what: str) -> None:
        self.place = publication.folder
        self.attempt = claim.attempt
        self._publication = publication
        self._claim = claim
        self._commits = commits
        self._root = commits.root
        self._state: Literal["begun", "committing", "committed", "abandoned", "in doubt"] = "begun"
        self._pid = os.getpid()
        self._what = what

    @staticmethod
    def begin(
        commits: Commits, claim: Claim, recorder: Recorder | None = None, *, goes_on: bool = False
    ) -> Transaction:
        """Sweep, and make the attempt's folder, durable in data/. It must be new, unless `goes_on`. ConflictError."""
        begun = time.perf_counter()
        what = f"step {claim.attempt.step} was {'saved' if claim.kind == 'save' else 'compacted'}"
        commits.root.check_in_place(what)
        if commits.in_doubt:
            if claim.kind == "save":
                forget_after(commits.in_doubt, claim.step)  # Somebody has gone back to before them.
            settle(commits.in_doubt)
        if claim.kind == "save" and commits.root.sweeps:
            commits.sweep()
        publication = commits.root.begin(claim, goes_on=goes_on, durable=commits.durable)
        if recorder is not None:
            recorder.note("begin", begun)
        return Transaction(commits, claim, publication, what=what)

    def head(self, **facts: Any) -> ManifestHead:
        """Return the head of the manifest: these facts, and what is the same for all."""
        usual: dict[str, Any] = {
            "kind": "delta" if facts.get("parents") else "full",
            "parents": (),
            "created": time.strftime(CREATED_FORMAT, time.gmtime()),
            "writer": WRITER,
            "ranks_count": 1,
            "metadata": {},
        }
        return ManifestHead(step=self.attempt.step, attempt=self.attempt.id, **(usual | facts))

    async def commit(self, draft: Draft, recorder: Recorder | None = None) -> Published:
        """Prove and publish. Runs in any loop; blocking calls run on the commit threads.

        ConflictError, CorruptError, IOFailedError, UsageError, of a compaction also NotFoundError, when nothing was
        published; InDoubt.
        """
        begun = time.perf_counter()
        assert self._state == "begun"
        self._state = "committing"
        head = draft.head
        self._claim.parents[:] = [parent.step for parent in head.parents[:1]]
        try:
            # As few handovers as can be: beside a busy trainer, each one waits for the interpreter.
            raw = await self._on_thread(self._prepare, draft, recorder)
            await self._publication.write(raw, self._commits.threads)
            await self._on_thread(self._publish, head, recorder)
        except InDoubt as error:
            self._note_doubt(error, head, raw)
            raise
        except BaseException:
            with contextlib.suppress(CheckpointError):  # No thread can be started.
                await self._on_thread(self._abandon)
            raise
        finally:
            self.place.close()
            if recorder is not None:
                recorder.note("commit", begun)
        sealed = self._committed(head, raw)
        parent = ParentFacts(step=head.step, attempt=head.attempt, digest=sealed.digest)
        return Published(parent=parent, manifest_bytes=len(raw))

    def _note_doubt(self, error: InDoubt, head: ManifestHead, raw: bytearray) -> None:
        self._state = "in doubt"
        if self._publication.can_send_again(head.file_name):
            error.settle = partial(self._settle, error, head, raw)
        self._commits.in_doubt.append(error)

    def _committed(self, head: ManifestHead, raw: bytearray) -> SealedHead:
        self._state = "committed"
        sealed = SealedHead(head=head, digest=written_digest(raw))
        if self._commits.remembers:
            self._commits.heads.add(sealed)
        if self._commits.uploader is not None:
            self._commits.uploader.upload(self.attempt)
        return sealed

    def close(self) -> None:
        """Give up what was begun and not committed, in the process that has begun it. Leaves a commit under way alone.
        Idempotent, never raises.
        """
        if self._state == "begun":
            if self._pid == os.getpid():
                self._abandon()
            self.place.close()

    async def give_up(self) -> None:
        """Close in a loop. What stays because no thread can be started is swept later."""
        with contextlib.suppress(CheckpointError):
            await self._on_thread(self.close)

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- on the commit threads -----------------------------------------------------------------------------------------

    async def _on_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._commits.threads, function, *arguments)

    def _prepare(self, draft: Draft, recorder: Recorder | None) -> bytearray:
        """Return the bytes of the manifest, proven."""
        begun = time.perf_counter()
        raw = encode_proven(draft)
        self._publication.prepare()
        if recorder is not None:
            recorder.note("prove", begun)
        return raw

    def _publish(self, head: ManifestHead, recorder: Recorder | None) -> None:
        begun = time.perf_counter()
        self._publication.settle()
        self._root.check_in_place(self._what)
        self._check_others(head)
        if self._commits.uploader is not None:
            self._root.manifests.make_empty(upload_mark_name(self.attempt))
        self._give_name(head.file_name)
        self._make_durable(head)
        if recorder is not None:
            recorder.note("publish", begun)

    def _abandon(self) -> None:
        """Remove what the attempt left, as far as that works; what stays is unreferenced and swept later."""
        self._state = "abandoned"
        self._publication.discard()
        with contextlib.suppress(CheckpointError, OSError):
            if self._commits.uploader is not None:
                self._root.manifests.remove_file(upload_mark_name(self.attempt))
        with contextlib.suppress(CheckpointError, OSError):
            self._root.data.remove_folder(self.attempt.directory)

    # -- proofs --------------------------------------------------------------------------------------------------------

    def _check_others(self, head: ManifestHead) -> None:
        """Check that the other checkpoints of the directory let this one be published."""
        if self._commits.lock is not None:
            self._commits.lock.check_held()
        self._check_stays(head)
        # A step whose own manifest is gone, because a compacted one stands for it, exists all the same.
        if self._root.manifests.exists(compacted_manifest_name(head.step)):
            raise step_exists(self._root, head.step)
        if head.replaces is not None:
            replaced = read_manifest(self._root, head.step)
            if replaced.digest != head.replaces:
                raise self._rewritten()
            if replaced.head.folder_name in being_removed(self._root):
                raise NotFoundError(f"step {head.step} of {str(self._root.path)!r} is being removed")

    def _rewritten(self) -> NotFoundError:
        return NotFoundError(
            f"step {self.attempt.step} of {str(self._root.path)!r} was rewritten while it was compacted"
        )

    def _check_stays(self, head: ManifestHead) -> None:
        """Check that all files are there, and the bases of a delta, down to a full one; and that all stays."""
        going = being_removed(self._root)
        if self.attempt.directory in going:
            raise folder_removed(self.place, self._what)
        self._publication.check_files(head, self._what)
        if not head.parents:
            return
        try:
            self._commits.chain.check(head, going=going)
        except CorruptError as error:
            from asyncckpt.commit.chain import base_lost

            raise base_lost(head.parents[0].step, str(error)) from error

    # -- the commit ----------------------------------------------------------------------------------------------------

    def _give_name(self, name: str) -> None:
        root, attempt = self._root, self.attempt
        try:
            self._publication.publish(name)
        except Exception as error:
            try:
                is_ours = find_manifest(root, attempt, name) is not None
            except Exception:
                # It is not known whether the manifest is there, so its data must stay.
                raise self._doubt(name, error) from error
            if isinstance(error, ConflictError):
                if is_ours:
                    return  # A replayed rename (NFS) reports EEXIST for our own success.
                raise step_exists(root, attempt.step) from error
            if self._publication.is_open(error, is_ours=is_ours):
                raise self._doubt(name, error) from error
            if not is_ours:
                raise

    def _make_durable(self, head: ManifestHead) -> None:
        try:
            self._publication.sync(head.file_name)
            self._check_after(head)
        except Exception as error:  # Of any kind: what is published keeps its files.
            raise self._doubt(head.file_name, error) from error

    def _check_after(self, head: ManifestHead) -> None:
        self._root.check_in_place(self._what)
        if head.replaces is not None:
            self._check_replaced(head, head.replaces)
        self._check_stays(head)  # The last look is that at the files.

    def _check_replaced(self, head: ManifestHead, digest: str) -> None:
        """Take a compaction back that stands beside another checkpoint of its step, which somebody without LOCK has
        removed and saved again right before the commit. NotFoundError.
        """
        found = digest
        with contextlib.suppress(NotFoundError):  # Retention may have what it stands for at once.
            found = self._commits.heads.of(manifest_name(head.step)).digest
        if found != digest:
            self._root.manifests.remove_file(head.file_name)
            raise self._rewritten()

    def _settle(self, doubt: InDoubt, head: ManifestHead, raw: bytearray) -> None:
        """Publish once more what is in doubt, unless it is there, or somebody was told that it is not."""

        def send() -> None:
            self._check_others(head)
            self._give_name(head.file_name)
            self._publication.sync(head.file_name)

        if find_manifest(self._root, self.attempt, head.file_name) is not None or doubt.send_anew(send):
            self._root.note(head.file_name)
            self._check_after(head)
            self._committed(head, raw)

    def _doubt(self, name: str, error: Exception) -> InDoubt:
        step = self.attempt.step
        what = f"checkpoint of step {step} may be visible, but is perhaps not durable, or not whole: {error}"
        return InDoubt(what, self._root.path, self.attempt, name)
