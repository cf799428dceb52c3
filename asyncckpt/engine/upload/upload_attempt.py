"""Copy a committed checkpoint to an object store: its files, then its manifest, which makes it visible there.

1. Its bases are uploaded first, the full checkpoint before its deltas; for most of them two requests show that they are
   there already: the manifest, and the list of its files. What is missing is uploaded again.
2. Files that the store has with their size are there: a key holds the random id of its attempt, and an upload becomes
   visible as a whole. So an upload goes on, file by file, where a crash ended it.
3. The other files are read by direct reads, part by part, and every block is compared with its digest on the way: what
   became corrupt on the disk does not get into the store.
4. Look at the files in the store.
5. Look at the other name that a manifest of the step can have: a compacted one may only stand beside the very manifest
   that it replaces. Anything else is a ConflictError, for loads would take the compacted one.
6. Put the manifest, unless its key is taken: the commit. The key of another writer's checkpoint is a ConflictError;
   where an answer is lost, what is there says whether it was ours.
7. Read it back, and look at the files again: someone may have removed them meanwhile.
8. Look again at its bases: a removal there sees what needs it by its manifest alone.
9. Remove the upload mark.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from asyncckpt.commit.chain import chain_below
from asyncckpt.commit.discover import KnownHeads, look_again
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.errors import ConflictError, CorruptError, IOFailedError, NotFoundError, Words
from asyncckpt.format import limits
from asyncckpt.format.head import FileFacts, ManifestHead, SealedHead, decode_head
from asyncckpt.format.manifest import BlockFacts, Manifest
from asyncckpt.format.names import (
    DATA_DIR,
    MANIFESTS_DIR,
    Attempt,
    compacted_manifest_name,
    manifest_name,
    parse,
    upload_mark_name,
)
from asyncckpt.format.read_manifest import decode_manifest
from asyncckpt.native import U8, Digester, Progress, Reads, ShortFile, core
from asyncckpt.options import UploadOptions
from asyncckpt.shard.reader import OpenFiles, blocks_by_file, owner_of
from asyncckpt.storage.directory import io_failed
from asyncckpt.storage.object_store import ObjectStore, part_bytes_of


class AttemptGoneError(NotFoundError):
    """What was to be uploaded has been removed."""


def upload_attempt(path: Path, store: ObjectStore, attempt: Attempt, options: UploadOptions) -> None:
    """Upload an attempt that is committed in the directory at `path`, with its bases.

    ConflictError; CorruptError of what is on the disk; IOFailedError and others of the store. AttemptGoneError: it has
    no mark any more, and need not be asked for again.
    """
    with CheckpointRoot.for_reading(path) as root:
        # Again where a compaction or a retention takes a manifest away meanwhile; what is in the store stays there.
        look_again(root, lambda: _upload_with_base(root, store, attempt, options))


def is_uploaded(store: ObjectStore, attempt: Attempt) -> bool:
    """Return whether the store holds this attempt of its step. CorruptError, IOFailedError."""
    name = manifest_name(attempt.step)
    try:
        raw = store.read_whole(f"{MANIFESTS_DIR}/{name}", bytes_max=limits.MANIFEST_BYTES_MAX)
    except NotFoundError:
        return False
    return decode_head(raw, name).head.attempt == attempt.id


def _upload_with_base(root: CheckpointRoot, store: ObjectStore, attempt: Attempt, options: UploadOptions) -> None:
    heads = KnownHeads(root)
    newest = _find(heads, attempt)
    if newest is None:
        root.manifests.remove_file(upload_mark_name(attempt))
        raise AttemptGoneError(f"step {attempt.step} was removed from {str(root.path)!r} before it was uploaded")
    below = chain_below(newest.head, heads.of_step)
    for sealed in (*reversed(below), newest):
        _upload(root, store, sealed.head.file_name, options)
    while below and _go_on_below(root, store, below, options):
        pass
    # Not synced: a mark that comes back is of what is in the store already.
    root.manifests.remove_file(upload_mark_name(attempt))


def _go_on_below(root: CheckpointRoot, store: ObjectStore, below: Sequence[SealedHead], options: UploadOptions) -> bool:
    """Upload bases that were removed from the store before anybody could see there what needs them; return whether
    anything was. IOFailedError, after which the upload is tried again, while something of it is being removed."""
    names = [parse(name) for name in store.names(MANIFESTS_DIR)]
    going = {name.folder for name in names if name is not None and name.removal}
    for sealed in below:
        if sealed.head.folder_name in going:
            what = f"step {sealed.head.step} is being removed from {str(store.url)!r}, and newer steps need it"
            raise IOFailedError(what, errno=errno.ETIMEDOUT, hint=f"if that has stopped: rm {sealed.head.step}")
    return any([_upload(root, store, sealed.head.file_name, options) for sealed in reversed(below)])


def _find(heads: KnownHeads, attempt: Attempt) -> SealedHead | None:
    for name in (manifest_name(attempt.step), compacted_manifest_name(attempt.step)):
        with contextlib.suppress(NotFoundError):
            sealed = heads.of(name)
            if sealed.head.attempt == attempt.id:
                return sealed
    return None


def _upload(root: CheckpointRoot, store: ObjectStore, name: str, options: UploadOptions) -> bool:
    """Upload one attempt; return False if it is there."""
    raw = root.manifests.read_file(name, bytes_max=limits.MANIFEST_BYTES_MAX)
    key = f"{MANIFESTS_DIR}/{name}"
    is_published = _is_there(store, key, raw)
    missing = _missing_of(store, decode_head(raw, name).head)
    if is_published and not missing:
        return False
    manifest = decode_manifest(raw, name)
    with contextlib.closing(OpenFiles(root.data, manifest, wanted=missing)) as files:
        blocks = blocks_by_file(manifest)
        for number in sorted(missing):
            file = manifest.head.files[number]
            part_bytes = part_bytes_of(file.bytes)
            parts = _checked_parts(files, number, manifest, blocks[number], part_bytes)
            store.put(file.path, parts, part_bytes=part_bytes, parallel=options.parallel)
    _check_files(store, manifest)
    if not is_published:
        _check_other_name(store, manifest)
        _publish(store, key, raw)
        store.check_kept(key, raw)
        _check_files(store, manifest)
    return True


def _publish(store: ObjectStore, key: str, raw: bytes) -> None:
    try:
        if store.put_new(key, raw):
            return
    except IOFailedError:
        if _is_there(store, key, raw):
            return  # Its answer was lost.
        raise
    if not _is_there(store, key, raw):  # Stores also refuse while somebody else writes to that key.
        raise IOFailedError(f"object {str(store.url / key)!r} is neither there nor can be made", errno=errno.ETIMEDOUT)


def _is_there(store: ObjectStore, key: str, raw: bytes) -> bool:
    """Return whether these bytes are published already; ConflictError for other ones."""
    try:
        found = store.read_whole(key, bytes_max=limits.MANIFEST_BYTES_MAX)
    except NotFoundError:
        return False
    if found != raw:
        raise _conflict(store, key)
    return True


def _check_other_name(store: ObjectStore, manifest: Manifest) -> None:
    """ConflictError where the step's other manifest in the store, its own or the compacted one, is of other data."""
    head = manifest.head
    name = compacted_manifest_name(head.step) if head.replaces is None else manifest_name(head.step)
    try:
        raw = store.read_whole(f"{MANIFESTS_DIR}/{name}", bytes_max=limits.MANIFEST_BYTES_MAX)
    except NotFoundError:
        return
    other = decode_head(raw, name)
    if head.replaces != other.digest and other.head.replaces != manifest.digest:
        raise _conflict(store, f"{MANIFESTS_DIR}/{name}")


def _conflict(store: ObjectStore, key: str) -> ConflictError:
    return ConflictError(
        f"object {str(store.url / key)!r} already exists, and is the manifest of another checkpoint",
        hint="does another writer upload to this URL? Upload to a prefix of its own, or remove that checkpoint",
    )


def _missing_of(store: ObjectStore, head: ManifestHead) -> set[int]:
    """Return the numbers of the files that the store does not have with their size."""
    there = {found.key: found.bytes for found in store.below(f"{DATA_DIR}/{head.folder_name}")}
    return {number for number, file in enumerate(head.files) if there.get(file.path) != file.bytes}


def _check_files(store: ObjectStore, manifest: Manifest) -> None:
    there = {found.key: found.bytes for found in store.below(f"{DATA_DIR}/{manifest.head.folder_name}")}
    for file in manifest.head.files:
        if there.get(file.path) != file.bytes:
            what = f"{owner_of(file, manifest)} was uploaded to {str(store.url)!r}, and is not there"
            raise CorruptError(
                what,
                found=there.get(file.path),
                expected=file.bytes,
                hint="does something else write to, or clean up, that prefix?",
            )


def _checked_parts(
    files: OpenFiles, number: int, manifest: Manifest, blocks: dict[str, BlockFacts], part_bytes: int
) -> Iterator[U8]:
    """Read a file part by part; CorruptError as soon as a block is not what was written. Its header was checked."""
    file = manifest.head.files[number]
    checks = _BlockChecks(file, manifest, blocks)
    for begin in range(0, file.bytes, part_bytes):
        part = np.empty(min(part_bytes, file.bytes - begin), dtype=np.uint8)
        places = np.array([[part.ctypes.data, begin, len(part)]], dtype=np.uint64)
        fds, direct = np.array([files.fds[number]], np.int32), np.array([files.direct[number]], np.int32)
        try:
            core.read(Reads(places, fds, direct), digests=False, threads=1, progress=Progress())
        except ShortFile as error:
            raise CorruptError(f"{owner_of(file, manifest)} ended while it was read: {error}") from error
        except OSError as error:
            raise io_failed(f"{owner_of(file, manifest)} cannot be read", error) from error
        checks.take(begin, part)
        yield part


class _BlockChecks:
    """Compares the blocks of a file with their digests, as its parts pass by."""

    def __init__(self, file: FileFacts, manifest: Manifest, blocks: dict[str, BlockFacts]) -> None:
        self._owner = owner_of(file, manifest)
        self._left = sorted(
            (block for block in blocks.values() if block.placed.spec.bytes), key=lambda block: -block.placed.offset
        )
        self._digester: Digester = core.digester()

    def take(self, begin: int, part: U8) -> None:
        end = begin + len(part)
        while self._left and self._left[-1].placed.offset < end:
            placed = self._left[-1].placed
            first, last = max(begin, placed.offset), min(end, placed.offset + placed.spec.bytes)
            self._digester.update(part.ctypes.data + first - begin, last - first)
            if last < placed.offset + placed.spec.bytes:
                return
            self._end(self._left.pop())

    def _end(self, block: BlockFacts) -> None:
        digest, self._digester = self._digester.end(), core.digester()
        if digest != block.digest:
            raise CorruptError(
                f"{self._owner} is damaged: {block.placed.spec.name!r} does not match its digest",
                found=Words(digest.hex()),
                expected=block.digest.hex(),
                hint="the checkpoint was not uploaded",
            )
