"""Find the checkpoints of a directory, and what failed saves left: the manifests are the only truth. Reads, and never
writes or deletes.

A step may have two manifests: its own, and that of a compacted checkpoint which stands for it. Readers of the step take
the compacted one; but its own one where the folder of the other is missing: a writer without a working lock had swept
it away before the compaction was published, so that was never acknowledged. And its own one where that is not what the
other was made of: somebody without a working lock, or in a store, has removed the step and saved it again.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from asyncckpt.errors import CheckpointError, CorruptError, IncompatibleError, NotFoundError, UnsupportedError
from asyncckpt.format import limits
from asyncckpt.format.head import FileFacts, ManifestHead, SealedHead, decode_head
from asyncckpt.format.manifest import Manifest, Summary
from asyncckpt.format.names import Attempt, Name, compacted_manifest_name, manifest_name, parse
from asyncckpt.format.read_manifest import decode_manifest, decode_summary
from asyncckpt.format.strict_json import Json
from asyncckpt.storage.directory import Directory

if TYPE_CHECKING:
    from asyncckpt.commit.root import ReadRoot, WriteRoot
    from asyncckpt.storage.store_folder import StoreFolder

Sealed = TypeVar("Sealed", bound=SealedHead)
T = TypeVar("T")
LOOKS_MAX = 9
UNREADABLE = (CorruptError, IncompatibleError, UnsupportedError)  # Of a manifest that is there.


def look_again(root: ReadRoot, look: Callable[[], T]) -> T:
    """Return what a look at the directory finds and opens, beginning with manifests.

    What it misses because retention takes it away, or something replaces it, while it is looked for, is not damaged. So
    an error counts when nothing but newer checkpoints has changed meanwhile. Raises what the last look raises.
    """
    for looks_left in reversed(range(LOOKS_MAX)):
        before = set(root.manifests.names())
        try:
            return look()
        except (CorruptError, NotFoundError):
            newest = max(map(_step_of, before), default=-1)
            after = {name for name in root.manifests.names() if name in before or not _step_of(name) > newest >= 0}
            if not looks_left or after == before:
                raise
    raise AssertionError("the last look returns or raises")


def _step_of(name: str) -> int:
    """Return the step of a manifest of this name; -1 for another file."""
    found = parse(name)
    return found.step if found is not None and found.kind in ("manifest", "compacted") else -1


@dataclass
class Listing:
    """What the names in manifests/ say, from one look at them. Foreign files are passed over.

    manifests    by step; the last one counts: the compacted one where there is one
    pins         steps that are pinned; some may be gone
    uploads      attempts that are to be uploaded, in the order of their steps
    temporaries  attempts by the name of their manifest, which is not published
    going        folders that somebody is about to remove
    """

    manifests: dict[int, list[str]] = field(default_factory=dict)
    pins: set[int] = field(default_factory=set)
    uploads: list[Attempt] = field(default_factory=list)
    temporaries: dict[str, str] = field(default_factory=dict)
    going: set[str] = field(default_factory=set)

    @staticmethod
    def of(root: ReadRoot) -> Listing:
        listing = Listing()
        # Sorted backwards, the manifest of a step comes before that of its compacted checkpoint.
        for name in sorted(root.manifests.names(), reverse=True):
            match parse(name):
                case Name("manifest" | "compacted", step):
                    listing.manifests.setdefault(step, []).append(name)
                case Name("pin", step):
                    listing.pins.add(step)
                case Name("upload", step, attempt):
                    listing.uploads.append(Attempt(step, attempt))
                case Name("temporary", _, attempt):
                    listing.temporaries[name] = attempt
                case Name("announced" | "decided") as mark:
                    listing.going.add(mark.folder)
        listing.uploads.reverse()
        return listing

    @property
    def compacted(self) -> set[int]:
        """The steps that have the manifest of a compacted checkpoint."""
        return {step for step, names in self.manifests.items() if names[-1] == compacted_manifest_name(step)}

    @property
    def names(self) -> set[str]:
        """The names of all manifests."""
        return {name for names in self.manifests.values() for name in names}


def committed_steps(root: ReadRoot) -> list[int]:
    """Return the steps that have a manifest, ascending."""
    return sorted({step for name in root.manifests.names() if (step := _step_of(name)) >= 0})


def is_committed(root: ReadRoot, step: int) -> bool:
    """Return whether a step has a manifest, be it a compacted one."""
    return any(root.manifests.exists(name) for name in (manifest_name(step), compacted_manifest_name(step)))


def being_removed(root: ReadRoot) -> set[str]:
    """Return the folders that somebody is about to remove. Look whether something is there only after this."""
    # A store renames a mark once, and one listing, which is not atomic, may miss it then.
    return {folder for _ in range(root.looks_for_marks) for folder in Listing.of(root).going}


def read_manifest(root: ReadRoot, step: int) -> Manifest:
    """Read and check the manifest of a step, the compacted one where there is one.

    Raises NotFoundError, CorruptError, IncompatibleError, UnsupportedError.
    """
    return _read_of_step(root, step, lambda name: decode_manifest(_bytes_of(root, name), name))


def read_summary(root: ReadRoot, step: int, listed: Sequence[str] = ()) -> Summary:
    """Read what a list shows of the manifest of a step, checked less deeply.

    listed: the names of its manifests, where they have just been listed: the only one needs no other look.
    """
    if len(listed) == 1:
        return decode_summary(_bytes_of(root, listed[0]), listed[0])
    return _read_of_step(root, step, lambda name: decode_summary(_bytes_of(root, name), name))


def read_head(root: ReadRoot, step: int) -> ManifestHead:
    """Read only the head of the manifest of a step, checked less deeply."""
    return _read_of_step(root, step, lambda name: decode_head(_bytes_of(root, name), name)).head


def head_in(root: ReadRoot, name: str) -> ManifestHead:
    """Read the head of the manifest of this name."""
    return decode_head(_bytes_of(root, name), name).head


def _read_of_step(root: ReadRoot, step: int, read: Callable[[str], Sealed]) -> Sealed:
    """Read the manifest that counts for a step. NotFoundError."""
    own, compacted = manifest_name(step), compacted_manifest_name(step)
    gone: NotFoundError | None = None
    # Twice the compacted one: it may be published, and the other removed, between the first two looks.
    for name in (compacted, own, compacted):
        if root.manifests.exists(name):
            try:
                found = read(name)
                if name == own or not root.manifests.exists(own):
                    return found
                if root.data.has_folder(found.head.folder_name) and _stands_for(found, own, read):
                    return found
            except NotFoundError as error:
                gone = error
    steps = committed_steps(root)
    if step in steps:
        what = f"step {step} is listed in {str(root.path)!r}, and its manifest is not found there"
        raise gone or NotFoundError(what, hint="try again, and see whether something else removes what is there")
    held = f"steps {shown_steps(steps)}" if steps else "no checkpoint"
    raise NotFoundError(f"step {step} is not in {str(root.path)!r}, which holds {held}")


def _stands_for(compacted: SealedHead, own: str, read: Callable[[str], Sealed]) -> bool:
    """Return whether a compacted checkpoint is made of what the own manifest says, or of what is damaged now."""
    try:
        return read(own).digest == compacted.head.replaces
    except CheckpointError:
        return True


def _bytes_of(root: ReadRoot, name: str) -> bytes:
    return root.manifests.read_file(name, bytes_max=limits.MANIFEST_BYTES_MAX)


class KnownHeads:
    """Heads of manifests by file name, without values, and of metadata only numbers and flags.

    Each is read once, and again when another file has its name: another Saver of this process may have removed the step
    and saved it again.
    """

    def __init__(self, root: WriteRoot) -> None:
        self._root = root
        self._heads: dict[str, tuple[tuple[Any, ...], SealedHead]] = {}
        self._folders: dict[str, tuple[Any, ...]] = {}  # Versions in which all files were there.

    def add(self, sealed: SealedHead) -> None:
        """Take note of a manifest that this process has just published."""
        name = sealed.head.file_name
        with contextlib.suppress(CheckpointError):  # Then it is read when it is needed.
            self._folders[name] = self._root.data.folder_version(sealed.head.folder_name)
            self._keep(name, self._root.manifests.version(name), sealed)

    def of(self, name: str) -> SealedHead:
        """Return the head in this file; CheckpointError when it cannot be read."""
        version = self._root.manifests.version(name)
        known = self._heads.get(name)
        if known is not None and known[0] == version:
            return known[1]
        return self._keep(name, version, decode_head(_bytes_of(self._root, name), name))

    def known(self, name: str) -> ManifestHead | None:
        """Return the head in this file, if it was published or read here and is still the same file; else None."""
        known = self._heads.get(name)
        return known[1].head if known is not None and known[0] == self._root.manifests.version(name) else None

    def check_folder(self, head: ManifestHead) -> None:
        """Check that all files are there, unless their folder is as it was then. CorruptError, IOFailedError."""
        version = self._root.data.folder_version(head.folder_name)
        if not version or version != self._folders.get(head.file_name):
            check_files(self._root, head)
            self._folders[head.file_name] = version

    def version(self, name: str) -> tuple[Any, ...]:
        """Return the version of the file that was read, or published, under this name; () when it was forgotten."""
        known = self._heads.get(name)
        return () if known is None else known[0]

    def of_step(self, step: int) -> SealedHead:
        """Return the head that counts for a step; CheckpointError when it cannot be read."""
        return _read_of_step(self._root, step, self.of)

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._heads.pop(name, None)
            self._folders.pop(name, None)

    def _keep(self, name: str, version: tuple[Any, ...], sealed: SealedHead) -> SealedHead:
        kept = replace(sealed, head=replace(sealed.head, values=(), metadata=numbers_of(sealed.head.metadata)))
        self._heads[name] = version, kept
        return kept


def numbers_of(metadata: Json) -> dict[str, Json]:
    """Return the numbers and flags among metadata, encoded as they are: all that rules of retention need."""
    if type(metadata) is not dict:
        return {}
    return {key: value for key, value in metadata.items() if type(value) in (bool, int) or _is_tagged_number(value)}


def _is_tagged_number(value: Json) -> bool:
    return type(value) is dict and len(value) == 1 and not value.keys().isdisjoint(("float", "int"))


def newest_step(root: ReadRoot) -> int:
    """Return the newest committed step; NotFoundError when there is none."""
    steps = committed_steps(root)
    if not steps:
        from asyncckpt.commit.foreign import what_is_there  # Looked for when nothing of ours is there.

        raise NotFoundError(f"there is no checkpoint in {str(root.path)!r}", **what_is_there(root.root))
    return steps[-1]


def check_files(root: WriteRoot, head: ManifestHead) -> None:
    """Check that every file is there with its exact size. CorruptError naming file and rank, IOFailedError."""
    if not head.files:
        return
    try:
        with root.data.child(head.folder_name) as folder:
            check_listed(folder, head.files, step=head.step)
    except NotFoundError as error:
        raise CorruptError(f"folder {head.folder_name!r} of step {head.step} is missing") from error


def check_listed(folder: Directory | StoreFolder, files: Iterable[FileFacts], *, step: int) -> None:
    """Check these files in the open folder of their attempt. One that was written through it must be the very same.

    CorruptError naming file and rank, IOFailedError.
    """
    for file in files:
        what = f"shard file {file.path!r} of rank {file.rank} of step {step}"
        try:
            folder.check_file(file.path.rpartition("/")[2], bytes=file.bytes)
        except NotFoundError as error:
            raise CorruptError(f"{what} is missing") from error
        except CorruptError as error:
            raise CorruptError(f"{what} is not what was written: {error}") from error


@dataclass(frozen=True)
class Leftovers:
    """What failed saves and removals have left in a directory.

    folders      in data/: of no manifest and no running attempt
    temporaries  manifests that were not published, and whose attempts do not run
    uploads      marks of attempts that do not run, and have no folder or one of these
    pins         the pinned steps that are gone
    unread       why a manifest cannot be read; folders of its step stay
    """

    folders: list[str]
    temporaries: list[str]
    uploads: list[Attempt]
    pins: set[int]
    unread: list[CheckpointError]


def find_leftovers(root: WriteRoot, heads: KnownHeads, keep_attempts: Container[str] = ()) -> Leftovers:
    """Return what a sweep may remove, if it is so still when each is looked at once more.

    Folders are listed before manifests: one whose manifest is published meanwhile is then seen to have one. Reads the
    manifests of steps with several folders or manifests only. keep_attempts: ids of running attempts.
    """
    there = root.data.names()
    listing = Listing.of(root)
    folders_of: dict[int, list[str]] = defaultdict(list)
    for name in there:
        found = parse(name)
        if found is not None and found.kind == "attempt" and found.attempt not in keep_attempts:
            folders_of[found.step].append(name)
    strays: list[str] = []
    unread: list[CheckpointError] = []
    for step, folders in folders_of.items():
        manifests = listing.manifests.get(step, [])
        if len(manifests) == len(folders) == 1:
            continue
        try:
            named = {heads.of(name).head.folder_name for name in manifests}
        except NotFoundError:  # Retention removes the step right now, and its folders.
            continue
        except CheckpointError as error:
            unread.append(error)
            continue
        strays += [folder for folder in folders if folder not in named]
    temporaries = [name for name, attempt in listing.temporaries.items() if attempt not in keep_attempts]
    stay = {*there} - {*strays}
    uploads = [one for one in listing.uploads if one.id not in keep_attempts and one.directory not in stay]
    pins = listing.pins - listing.manifests.keys()
    return Leftovers(strays, temporaries, uploads, pins, unread)


def shown_steps(steps: list[int]) -> str:
    """Return some of these steps, for a message."""
    if len(steps) <= 8:
        return str(steps)
    return f"[{steps[0]}, {steps[1]}, ... {len(steps) - 4} more ..., {steps[-2]}, {steps[-1]}]"
