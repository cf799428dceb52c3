"""Find the checkpoints of a directory: the manifests are the only truth. Reads, and never writes or deletes.

A step may have two manifests: its own, and that of a compacted checkpoint which stands for it. Whoever looks for the
step takes the compacted one.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.errors import CorruptError, NotFoundError
from asyncckpt.format import limits
from asyncckpt.format.manifest import FileFacts, Manifest, ManifestHead
from asyncckpt.format.names import (
    Attempt,
    compacted_manifest_name,
    is_compacted_manifest,
    manifest_name,
    split_shard_path,
    step_of_manifest,
)
from asyncckpt.format.read_head import decode_head
from asyncckpt.format.read_manifest import decode_manifest
from asyncckpt.storage.directory import Directory


def committed_steps(root: CheckpointRoot) -> list[int]:
    """Steps that have a manifest, ascending. Foreign files are passed over."""
    return sorted({step for name in root.manifests.names() if (step := step_of_manifest(name)) is not None})


def is_committed(root: CheckpointRoot, step: int) -> bool:
    """Whether a step has a manifest, be it a compacted one."""
    return any(root.manifests.exists(name) for name in (manifest_name(step), compacted_manifest_name(step)))


def read_manifest(root: CheckpointRoot, step: int) -> Manifest:
    """Read and check the manifest of a step, the compacted one where there is one.

    Raises NotFoundError, CorruptError, IncompatibleError, UnsupportedError.
    """
    name, raw = _raw_manifest(root, step)
    return decode_manifest(raw, owner=f"manifest {name!r}", step=step, compacted=is_compacted_manifest(name))


def read_head(root: CheckpointRoot, step: int) -> ManifestHead:
    """The same, but only its head, checked less deeply."""
    name, raw = _raw_manifest(root, step)
    return decode_head(raw, owner=f"manifest {name!r}", step=step, compacted=is_compacted_manifest(name))


def read_named_head(root: CheckpointRoot, name: str) -> ManifestHead:
    """The head in the manifest file of this name, which is that of a step."""
    step = step_of_manifest(name)
    assert step is not None
    raw = root.manifests.read_file(name, bytes_max=limits.MANIFEST_BYTES_MAX)
    return decode_head(raw, owner=f"manifest {name!r}", step=step, compacted=is_compacted_manifest(name))


def superseded_folders(root: CheckpointRoot, step: int) -> set[str]:
    """Attempt folders of the manifest that a compacted one stands for, where both are there."""
    if not root.manifests.exists(compacted_manifest_name(step)):
        return set()
    try:
        return {attempt_folder(read_named_head(root, manifest_name(step)))}
    except NotFoundError:
        return set()


def _raw_manifest(root: CheckpointRoot, step: int) -> tuple[str, bytes]:
    """Name and bytes of the manifest that speaks for a step."""
    compacted = compacted_manifest_name(step)
    # Twice the compacted one: it may be published, and the other removed, between the first two looks.
    for name in (compacted, manifest_name(step), compacted):
        try:
            return name, root.manifests.read_file(name, bytes_max=limits.MANIFEST_BYTES_MAX)
        except NotFoundError:
            continue
    steps = committed_steps(root)
    raise NotFoundError(f"there is no checkpoint of step {step} in {str(root.path)!r}", found=f"steps {_shown(steps)}")


def newest_step(root: CheckpointRoot) -> int:
    """The newest committed step; NotFoundError when there is none."""
    steps = committed_steps(root)
    if not steps:
        raise NotFoundError(f"there is no checkpoint in {str(root.path)!r}")
    return steps[-1]


def check_files(root: CheckpointRoot, head: ManifestHead, folder: Directory | None = None) -> None:
    """Every file of a manifest is there with its exact size; CorruptError naming file and rank, IOFailedError.

    folder: the attempt's, held open; a file that was written through it must be the very same.
    """
    if folder is None and head.files:
        name = attempt_folder(head)
        try:
            with root.data.child(name) as opened:
                return check_files(root, head, opened)
        except NotFoundError as error:
            raise CorruptError(f"folder {name!r} of step {head.step} is missing") from error
    if folder is not None:
        check_listed(folder, head.files, step=head.step)


def check_listed(folder: Directory, files: Iterable[FileFacts], *, step: int) -> None:
    """These files are in their attempt's folder: see check_files."""
    for file in files:
        what = f"shard file {file.path!r} of rank {file.rank} of step {step}"
        try:
            folder.check_file(split_shard_path(file.path, owner=what)[1], bytes=file.bytes)
        except NotFoundError as error:
            raise CorruptError(f"{what} is missing") from error
        except CorruptError as error:
            raise CorruptError(f"{what} is not what was written: {error}") from error


def attempt_folder(head: ManifestHead) -> str:
    """The folder below data/ with all files of a manifest."""
    return Attempt(step=head.step, id=head.attempt).directory


def _shown(steps: list[int]) -> str:
    if len(steps) <= 8:
        return str(steps)
    return f"[{steps[0]}, {steps[1]}, ... {len(steps) - 4} more ..., {steps[-2]}, {steps[-1]}]"


_verified: set[tuple[tuple[int, int], int]] = set()  # (directory, step)


def mark_verified(root: CheckpointRoot, step: int) -> None:
    """Remember that this process has verified a step; retention will not remove the newest such step."""
    _verified.add((root.root.identity, step))


def newest_verified(root: CheckpointRoot) -> set[int]:
    """Return the newest step of this directory that this process has verified, as a set of none or one."""
    own = root.root.identity
    return set(sorted(step for directory, step in list(_verified) if directory == own)[-1:])
