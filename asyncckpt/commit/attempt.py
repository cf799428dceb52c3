"""An attempt at a step: its claim, the proof of its manifest, and how that gets to its place.

A step is claimed before anything is made for it, and released when its commit has ended or was given up. So no step is
saved twice at once, "the next step" counts those in flight, and a sweep knows the attempts whose folders must stay.

Before a manifest is published, the readers' own code decodes it, unless that of a plan of the same structure was
decoded before: then all that differs (digests, sizes that follow from rows, files) is written by the same code from the
same plan, and only the head, with the plain values and the files, is decoded. Files are looked at for every commit: see
transaction.py.

It gets to its place on a disk by a rename, in a store by a conditional PUT:

    a disk                                               a store
    a temporary file, written and synced                 nothing is made before the PUT
    a rename that refuses to replace                     PUT with If-None-Match
    the folder above is synced, else it is in doubt      it is read back, else it is in doubt
    the attempt's folder is where it was made            a key holds the id of the attempt: nobody else uses it

A PUT that was not answered may still come to its end: until the manifest is found, such a commit is in doubt.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import IO, Any, Literal, Protocol

import numpy as np
import xxhash
from aiofiles.threadpool import wrap
from numpy.typing import NDArray

from asyncckpt import system
from asyncckpt.commit.disagreement import check_written, disagreement
from asyncckpt.commit.discover import committed_steps, is_committed
from asyncckpt.commit.root import CheckpointRoot, ReadRoot, StoreRoot, WriteRoot
from asyncckpt.errors import CheckpointError, ConflictError, CorruptError, IOFailedError
from asyncckpt.format.manifest import ManifestHead
from asyncckpt.format.names import MANIFESTS_DIR, Attempt, temporary_manifest_name
from asyncckpt.format.read_head import decode_head
from asyncckpt.format.read_manifest import decode_manifest
from asyncckpt.format.write_manifest import BodyTemplate, PartText, encode_manifest
from asyncckpt.guard import Guard
from asyncckpt.storage.directory import Directory, io_failed
from asyncckpt.storage.store_answers import is_timeout
from asyncckpt.storage.store_folder import StoreFolder
from asyncckpt.system import register_at_fork

REFUSED_S_MAX = 10.0  # Of a PUT, while the name is not taken.
PAUSE_S = 0.05
PROVEN_MAX = 64
_NO_BODY = BodyTemplate(text=b'"tables":[],"tree":{},"blocks":[]', holes=np.empty(0, dtype=np.int64))
_NO_DIGESTS = np.empty((0, 16), dtype=np.uint8)

# Structures of manifests that were decoded, by kind and rank; the oldest are forgotten first.
_proven: dict[tuple[str | None, ...], None] = {}


@dataclass(frozen=True)
class Claim:
    """A step of the directory with this identity, and the attempt that is made at it.

    parents: the steps that it builds upon directly; retention must keep them. is_next: no step was asked for.
    """

    place: tuple[Any, ...]
    kind: Literal["save", "compaction"]
    attempt: Attempt
    parents: list[int] = field(default_factory=list)
    is_next: bool = False

    @property
    def step(self) -> int:
        return self.attempt.step

    def release(self) -> None:
        """Let others have the step. Idempotent, and takes no lock: finalizers call it."""
        claims.held.pop(self.attempt.id, None)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Claims(Container[str]):
    """All claims of this process, by the ids of their attempts."""

    def __init__(self) -> None:
        self._guard = Guard()
        self.held: dict[str, Claim] = {}

    def save(self, root: WriteRoot, step: int | None, attempt_of: Callable[[int], Attempt] = Attempt.new) -> Claim:
        """Claim a step to save, or the next: one more than the newest that is committed or being saved here.

        attempt_of: which attempt it is: an import goes on with one that was killed. UsageError; ConflictError for a
        step that exists, as far as a call may look, or is being saved.
        """
        place, seen = root.root.identity, root.in_calls
        while True:
            others = self._steps(place, "save")
            chosen = max([-1, *others, *committed_steps(seen)[-1:]]) + 1 if step is None else step
            attempt = attempt_of(chosen)
            with self._guard:
                is_free = chosen not in self._steps(place, "save")
                claim = self._hold(Claim(place, "save", attempt, is_next=step is None)) if is_free else None
            if claim is not None:
                with contextlib.ExitStack() as held:
                    held.enter_context(claim)
                    # Behind the claim: who has had one of this step has committed it by now, or never will.
                    if not is_committed(seen, chosen) or (root.look_anew() and not is_committed(seen, chosen)):
                        held.pop_all()
                        return claim
            if step is not None:
                raise step_exists(root, step)

    def compaction(self, root: WriteRoot, step: int) -> Claim:
        """Claim a step to compact, which retention keeps, unless it has announced its removal before (removal.py).

        ConflictError when it is being compacted already.
        """
        place = root.root.identity
        with self._guard:
            if step in self._steps(place, "compaction"):
                raise ConflictError(f"step {step} of {str(root.path)!r} is being compacted already")
            return self._hold(Claim(place, "compaction", Attempt.new(step)))

    def needed(self, place: tuple[Any, ...]) -> set[int]:
        """Return the steps that are being saved or compacted, and those that saves build upon."""
        claimed = [claim for claim in list(self.held.values()) if claim.place == place]
        return {step for claim in claimed for step in (claim.step, *claim.parents)}

    def _steps(self, place: tuple[Any, ...], kind: str) -> list[int]:
        return [claim.step for claim in list(self.held.values()) if (claim.place, claim.kind) == (place, kind)]

    def _hold(self, claim: Claim) -> Claim:
        self.held[claim.attempt.id] = claim
        return claim

    def forget(self) -> None:
        """Start anew in a forked child, where nothing is saved."""
        self.held = {}

    def __contains__(self, attempt: object) -> bool:
        return attempt in self.held


claims = Claims()
register_at_fork(after_in_child=claims.forget)


def step_exists(root: ReadRoot, step: int) -> ConflictError:
    return ConflictError(
        f"step {step} exists already in {str(root.path)!r}",
        hint="steps are never overwritten: save another step, or remove that checkpoint first",
    )


@dataclass(frozen=True)
class Draft:
    """What a manifest is made of. body and digests are those of rank 0, others the parts of ranks 1, 2, ...

    structures: of every rank a digest of what its part says beside digests and sizes; None where that is not known.
    Empty: of none. holds_all: no filter has left anything out, so each tensor that a rank has must be there.
    """

    head: ManifestHead
    body: BodyTemplate
    digests: NDArray[np.uint8]
    others: Sequence[PartText] = ()
    structures: Sequence[str | None] = ()
    holds_all: bool = False


def body_structure(body: BodyTemplate) -> str:
    """Return a digest of what a body says, but the digests of blocks."""
    return xxhash.xxh3_128_hexdigest(body.text)


def encode_proven(draft: Draft) -> bytearray:
    """Return the bytes of a manifest that readers accept. CorruptError, UsageError; ConflictError of ranks."""
    head = draft.head
    raw = encode_manifest(head, draft.body, draft.digests, draft.others)
    known = (head.kind, *draft.structures)
    is_known = len(draft.structures) == head.ranks_count and None not in draft.structures
    if is_known and known in _proven:
        decode_head(bytes(encode_manifest(replace(head, ranks_count=1), _NO_BODY, _NO_DIGESTS)), head.file_name)
    else:
        try:
            manifest = decode_manifest(bytes(raw), head.file_name)
        except CorruptError as error:
            conflict = disagreement(bytes(raw), head.file_name) if head.ranks_count > 1 else None
            if conflict is not None:
                raise conflict from error
            raise
        if draft.holds_all:
            check_written(manifest)
    if is_known:
        _proven.pop(known, None)
        _proven[known] = None
        for oldest in list(_proven)[:-PROVEN_MAX]:
            _proven.pop(oldest, None)
    return raw


class Publication(Protocol):
    """One manifest on its way to its place. Blocking calls are for the threads of commits."""

    def prepare(self) -> None:
        """Make the files of the attempt durable, and what the manifest is written to. ConflictError."""
        ...

    async def write(self, raw: bytes | bytearray, threads: Executor) -> None: ...

    def settle(self) -> None:
        """Make the manifest durable, where it has no name yet that a reader looks for."""
        ...

    def check_folder(self, what: str) -> Directory | None:
        """Check that the attempt's folder is the one that was made; return it where files are held by it."""
        ...

    def publish(self, name: str) -> None:
        """Commit. ConflictError when the name is taken, be it by ourselves; IOFailedError."""
        ...

    def is_open(self, error: Exception, *, is_ours: bool) -> bool:
        """Return whether it is not known, after an error of `publish`, what will be there. is_ours: it was found."""
        ...

    def sync(self, name: str) -> None:
        """Make what was published durable, or look that it is. IOFailedError."""
        ...

    def discard(self) -> None:
        """Remove what was written and not published. Never raises."""
        ...


class FilePublication:
    """On a disk."""

    def __init__(self, root: CheckpointRoot, folder: Directory, attempt: Attempt, *, durable: bool) -> None:
        self._root, self._folder, self._attempt, self._durable = root, folder, attempt, durable
        self._file: IO[bytes] = io.BytesIO()  # From `prepare` on, one on the disk.

    def prepare(self) -> None:
        if self._durable:
            self._folder.sync()
        fd, _ = self._root.manifests.create_file(temporary_manifest_name(self._attempt))
        self._file = os.fdopen(fd, "wb", buffering=0)

    async def write(self, raw: bytes | bytearray, threads: Executor) -> None:
        """Write all bytes; a raw file may take less than it is given."""
        with self._writing():
            file, rest = wrap(self._file, executor=threads), memoryview(raw)
            while rest:
                written = await file.write(rest)
                if not written:
                    raise OSError(errno.EIO, "nothing was written")
                rest = rest[written:]

    def settle(self) -> None:
        with self._writing(), self._file:
            if self._durable:
                system.fsync(self._file.fileno())

    def check_folder(self, what: str) -> Directory | None:
        if not self._root.data.has(self._attempt.directory, self._folder.identity):
            raise folder_removed(self._folder, what)
        return self._folder

    def publish(self, name: str) -> None:
        self._root.manifests.publish(temporary_manifest_name(self._attempt), name)

    def is_open(self, error: Exception, *, is_ours: bool) -> bool:
        return is_ours

    def sync(self, name: str) -> None:
        if self._durable:
            self._root.manifests.sync()

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(CheckpointError, OSError):
            self._root.manifests.remove_file(temporary_manifest_name(self._attempt))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise io_failed(f"manifest of step {self._attempt.step} cannot be written", error) from error


class ObjectPublication:
    """In a store."""

    def __init__(self, root: StoreRoot, attempt: Attempt) -> None:
        self._root, self._attempt = root, attempt
        self._raw: bytes | bytearray = b""

    def prepare(self) -> None:
        """Nothing is there yet."""

    async def write(self, raw: bytes | bytearray, threads: Executor) -> None:
        self._raw = raw

    def settle(self) -> None:
        """Objects are durable."""

    def check_folder(self, what: str) -> Directory | None:
        return None

    def publish(self, name: str) -> None:
        key, until, is_under_way = f"{MANIFESTS_DIR}/{name}", time.monotonic() + REFUSED_S_MAX, False
        what = f"object {str(self._root.store.url / key)!r}"
        while True:
            try:
                if self._root.store.put_new(key, bytes(self._raw)):
                    return
            except CheckpointError as error:
                if is_under_way:  # Perhaps by a try of ours.
                    raise IOFailedError(error.what, errno=errno.ETIMEDOUT, hint=error.hint) from None
                raise
            if self._root.manifests.exists(name):
                raise ConflictError(f"{what} exists already")
            if time.monotonic() >= until:
                raise IOFailedError(f"{what} is neither there nor can be made", errno=errno.ETIMEDOUT)
            is_under_way = True  # Stores also refuse while another request for that key is.
            time.sleep(PAUSE_S)

    def is_open(self, error: Exception, *, is_ours: bool) -> bool:
        return not is_ours and (is_timeout(error) or not isinstance(error, CheckpointError))

    def sync(self, name: str) -> None:
        self._root.store.check_kept(f"{MANIFESTS_DIR}/{name}", self._raw)

    def discard(self) -> None:
        """What was not published was not put."""


def folder_removed(folder: Directory | StoreFolder, what: str) -> ConflictError:
    return ConflictError(
        f"folder {str(folder.path)!r} was removed while {what}",
        hint="does something else write to, or clean up, the checkpoint directory?",
    )


def begin_attempt(
    root: WriteRoot, claim: Claim, *, goes_on: bool, durable: bool
) -> tuple[Directory | StoreFolder, Publication]:
    """Make the attempt's folder, durable in data/, and what publishes it. The folder must be new, unless `goes_on`."""
    attempt = claim.attempt
    if isinstance(root, StoreRoot):
        root.remembered.look()
        if claim.kind == "save" and is_committed(root.in_calls, attempt.step):
            raise step_exists(root, attempt.step)
        return root.data.child(attempt.directory), ObjectPublication(root, attempt)
    is_there = goes_on and root.data.has_folder(attempt.directory)
    folder = root.data.child(attempt.directory) if is_there else root.data.make_folder(attempt.directory)
    try:
        root.data.sync()
    except BaseException:
        folder.close()
        raise
    return folder, FilePublication(root, folder, attempt, durable=durable)
