"""Find the checkpoints of a directory: the manifests are the only truth. Reads, and never writes or deletes."""

from __future__ import annotations

from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.errors import CorruptError, NotFoundError
from asyncckpt.format.manifest import MANIFEST_BYTES_MAX, Manifest, ManifestHead
from asyncckpt.format.names import manifest_name, split_shard_path, step_of_manifest
from asyncckpt.format.read_manifest import decode_head, decode_manifest


def committed_steps(root: CheckpointRoot) -> list[int]:
    """Steps that have a manifest, ascending. Foreign files are passed over."""
    return sorted(step for name in root.manifests.names() if (step := step_of_manifest(name)) is not None)


def read_manifest(root: CheckpointRoot, step: int) -> Manifest:
    """Read and check the manifest of a step; NotFoundError, CorruptError, IncompatibleError."""
    return decode_manifest(_raw_manifest(root, step), owner=f"manifest {manifest_name(step)!r}", step=step)


def read_head(root: CheckpointRoot, step: int) -> ManifestHead:
    """The same, but only its head, checked less deeply."""
    return decode_head(_raw_manifest(root, step), owner=f"manifest {manifest_name(step)!r}", step=step)


def _raw_manifest(root: CheckpointRoot, step: int) -> bytes:
    try:
        return root.manifests.read_file(manifest_name(step), bytes_max=MANIFEST_BYTES_MAX)
    except NotFoundError:
        steps = committed_steps(root)
        raise NotFoundError(
            f"there is no checkpoint of step {step} in {str(root.path)!r}", found=f"steps {_shown(steps)}"
        ) from None


def newest_step(root: CheckpointRoot) -> int:
    """The newest committed step; NotFoundError when there is none."""
    steps = committed_steps(root)
    if not steps:
        raise NotFoundError(f"there is no checkpoint in {str(root.path)!r}")
    return steps[-1]


def check_files(root: CheckpointRoot, head: ManifestHead) -> None:
    """Every file of a manifest is there with its exact size; CorruptError naming file and rank."""
    for file in head.files:
        folder, name = split_shard_path(file.path, owner=f"manifest of step {head.step}")
        try:
            with root.data.child(folder) as directory:
                size = directory.size(name)
        except NotFoundError as error:
            raise CorruptError(
                f"shard file {file.path!r} of rank {file.rank} of step {head.step} is missing"
            ) from error
        if size != file.bytes:
            raise CorruptError(
                f"shard file {file.path!r} of step {head.step} has the wrong size", found=size, expected=file.bytes
            )


def _shown(steps: list[int]) -> str:
    if len(steps) <= 8:
        return str(steps)
    return f"[{steps[0]}, {steps[1]}, ... {len(steps) - 4} more ..., {steps[-2]}, {steps[-1]}]"
