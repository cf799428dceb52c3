"""Every file name of a checkpoint directory: built and parsed here, nowhere else.

    LOCK
    manifests/000000000120.json            the step, 12 digits
    manifests/000000000120.full.json       the same step, compacted: a full checkpoint that stands for it
    manifests/000000000120.pin             an empty file: the step is pinned
    manifests/.m-<attempt>                 a manifest before its publication
    manifests/.u-000000000120-<attempt>    an empty file: the attempt is to be uploaded
    manifests/.r-<id>-000000000120-<attempt>   an empty file: the removal of this id wants to remove this attempt
    manifests/.d-<id>-000000000120-<attempt>   and has decided to
    data/000000000120-<attempt>/r00000-000.safetensors
    data/000000000120-<attempt>/.written   while an import runs: storage/written_chunks.py

Names hold lower-case letters, digits, '-', '_' and '.', so every file system keeps them apart. Names of tensors and
tables never become file names.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from asyncckpt.errors import CorruptError, UsageError
from asyncckpt.format import limits

LOCK_NAME = "LOCK"
MANIFESTS_DIR = "manifests"
DATA_DIR = "data"

_MANIFEST = re.compile(r"([0-9]{12})(\.full)?\.json")
_PIN = re.compile(r"([0-9]{12})\.pin")
_TEMPORARY = re.compile(r"\.m-([0-9a-f]{32})")
_ATTEMPT_DIR = re.compile(r"([0-9]{12})-([0-9a-f]{32})")
_MARK = re.compile(rf"\.([rd])-([0-9a-f]{{32}})-({_ATTEMPT_DIR.pattern})")
_UPLOAD_MARK = re.compile(rf"\.u-({_ATTEMPT_DIR.pattern})")
# Three digits, or as many as it takes.
_SHARD = re.compile(r"r([0-9]{5})-([0-9]{3}|[1-9][0-9]{3,5})\.safetensors")
_SHARD_PATH = re.compile(rf"{DATA_DIR}/(?P<folder>{_ATTEMPT_DIR.pattern})/(?P<name>{_SHARD.pattern})")


@dataclass(frozen=True)
class Attempt:
    """One try to save one step: its folder is never reused, but by an import that was killed (commit_import.py)."""

    step: int
    id: str

    @staticmethod
    def new(step: int) -> Attempt:
        """A new attempt; UsageError for a step that has no name."""
        limits.check_step(step, or_none=False)
        return Attempt(step=step, id=uuid.uuid4().hex)

    @property
    def directory(self) -> str:
        return f"{self.step:012d}-{self.id}"


def manifest_name(step: int) -> str:
    return f"{step:012d}.json"


def compacted_manifest_name(step: int) -> str:
    """Return the name of the manifest that replaces a step's own, which may still be there."""
    return f"{step:012d}.full.json"


def temporary_manifest_name(attempt: Attempt) -> str:
    return f".m-{attempt.id}"


def shard_name(*, rank: int, index: int) -> str:
    """Return the name of a rank's shard file of this number; UsageError for one too many."""
    if rank >= limits.RANKS_MAX or index >= limits.FILES_MAX:
        raise UsageError(
            "there are too many ranks or shard files",
            found=f"file {index} of rank {rank}",
            expected=f"at most {limits.FILES_MAX} files of each of {limits.RANKS_MAX} ranks",
        )
    return f"r{rank:05d}-{index:03d}.safetensors"


def rank_of_shard(name: str) -> int | None:
    """Return the rank that wrote a shard file; None for a foreign file."""
    match = _SHARD.fullmatch(name)
    return int(match.group(1)) if match else None


def step_of_manifest(name: str) -> int | None:
    """Return the step of a manifest's file name, compacted or not; None for a foreign file."""
    match = _MANIFEST.fullmatch(name)
    return int(match.group(1)) if match else None


def pin_name(step: int) -> str:
    return f"{step:012d}.pin"


def step_of_pin(name: str) -> int | None:
    """Return the step that a file of this name pins; None for another file."""
    match = _PIN.fullmatch(name)
    return int(match.group(1)) if match else None


def is_compacted_manifest(name: str) -> bool:
    match = _MANIFEST.fullmatch(name)
    return match is not None and match.group(2) is not None


def attempt_id_of_temporary(name: str) -> str | None:
    """Return the id of the attempt of a manifest that is not yet published; None for another file."""
    match = _TEMPORARY.fullmatch(name)
    return match.group(1) if match else None


def upload_mark_name(attempt: Attempt) -> str:
    return f".u-{attempt.directory}"


def attempt_of_upload_mark(name: str) -> Attempt | None:
    """Return the attempt that a file of this name wants to be uploaded; None for another file."""
    match = _UPLOAD_MARK.fullmatch(name)
    return attempt_of_directory(match.group(1)) if match else None


@dataclass(frozen=True)
class Mark:
    """Says that the removal of this id is about to remove a folder under data/, and its manifest."""

    id: str
    folder: str
    is_decided: bool = False

    @property
    def name(self) -> str:
        return f".{'d' if self.is_decided else 'r'}-{self.id}-{self.folder}"

    @staticmethod
    def of(name: str) -> Mark | None:
        """Return the mark of this file name; None for another file."""
        match = _MARK.fullmatch(name)
        return Mark(match.group(2), match.group(3), is_decided=match.group(1) == "d") if match else None


def attempt_of_directory(name: str) -> Attempt | None:
    """Return the attempt of a folder under data/; None for a foreign one."""
    match = _ATTEMPT_DIR.fullmatch(name)
    return Attempt(step=int(match.group(1)), id=match.group(2)) if match else None


def shard_path(attempt: Attempt, name: str) -> str:
    return f"{DATA_DIR}/{attempt.directory}/{name}"


def split_shard_path(path: str, *, owner: str) -> tuple[str, str]:
    """(attempt folder, file name) of a path from a manifest; CorruptError for anything but the form above."""
    match = _SHARD_PATH.fullmatch(path)
    if match is None:
        raise CorruptError(
            f"{owner} names a file outside its checkpoint",
            found=path,
            expected="data/<step>-<attempt>/r<rank>-<index>.safetensors",
        )
    return match["folder"], match["name"]
