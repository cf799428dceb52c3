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
from typing import Any, Literal, NamedTuple

from asyncckpt.arguments import as_int
from asyncckpt.errors import CorruptError, UsageError, Words, must_be
from asyncckpt.format import limits

LOCK_NAME = "LOCK"
MANIFESTS_DIR = "manifests"
DATA_DIR = "data"

_ATTEMPT = "[0-9]{12}-[0-9a-f]{32}"
_NAME = re.compile(
    r"(?P<step>[0-9]{12})(?P<suffix>\.json|\.full\.json|\.pin)"
    r"|\.m-(?P<temporary>[0-9a-f]{32})"
    rf"|(?P<mark>\.u-|\.[rd]-(?P<removal>[0-9a-f]{{32}})-)?(?P<folder>{_ATTEMPT})"
)
Kind = Literal["manifest", "compacted", "pin", "temporary", "upload", "announced", "decided", "attempt"]
_KINDS: dict[str, Kind] = {
    ".json": "manifest",
    ".full.json": "compacted",
    ".pin": "pin",
    ".u-": "upload",
    ".r-": "announced",
    ".d-": "decided",
    "": "attempt",
}
# Three digits, or as many as it takes.
_SHARD = re.compile(r"r([0-9]{5})-([0-9]{3}|[1-9][0-9]{3,5})\.safetensors")
_SHARD_PATH = re.compile(rf"{DATA_DIR}/(?P<folder>{_ATTEMPT})/(?P<name>{_SHARD.pattern})")


def check_step(step: Any, *, name: str = "step", or_none: bool = True) -> Any:
    """Return the number of a step as an int, also of a NumPy integer; UsageError for anything else.

    or_none: None is allowed, for the newest or the next one.
    """
    if step is None and or_none:
        return None
    if type(step) is not int:
        step = as_int(step)
    if type(step) is not int or not 0 <= step <= limits.STEP_MAX:
        raise must_be(name, f"an int in [0, {limits.STEP_MAX}]", step)
    return step


@dataclass(frozen=True)
class Attempt:
    """One try to save one step: its folder is never reused, but by an import that was killed (commit_import.py)."""

    step: int
    id: str

    @staticmethod
    def new(step: int) -> Attempt:
        """A new attempt; UsageError for a step that has no name."""
        check_step(step, or_none=False)
        return Attempt(step=step, id=uuid.uuid4().hex)

    @property
    def directory(self) -> str:
        return f"{self.step:012d}-{self.id}"


class Name(NamedTuple):
    """What the name of a file in manifests/, or of a folder in data/, says.

    step     -1 of a temporary manifest, whose name does not say it
    attempt  the id of the attempt; empty of manifests and pins
    removal  of a mark, the id of the removal that has made it
    """

    kind: Kind
    step: int
    attempt: str = ""
    removal: str = ""

    @property
    def folder(self) -> str:
        """The name of the attempt's folder."""
        return f"{self.step:012d}-{self.attempt}"


def parse(name: str) -> Name | None:
    """Return what a name says; None for a foreign file."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    step, suffix, temporary, mark, removal, folder = match.groups(default="")
    if suffix:
        return Name(_KINDS[suffix], int(step))
    if temporary:
        return Name("temporary", -1, temporary)
    return Name(_KINDS[mark[:3]], int(folder[:12]), folder[13:], removal)


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
            found=Words(f"file {index} of rank {rank}"),
            expected=f"at most {limits.FILES_MAX} files of each of {limits.RANKS_MAX} ranks",
        )
    return f"r{rank:05d}-{index:03d}.safetensors"


def pin_name(step: int) -> str:
    return f"{step:012d}.pin"


def upload_mark_name(attempt: Attempt) -> str:
    return f".u-{attempt.directory}"


@dataclass(frozen=True)
class Mark:
    """Says that the removal of this id is about to remove a folder under data/, and its manifest."""

    id: str
    folder: str
    is_decided: bool = False

    @property
    def name(self) -> str:
        return f".{'d' if self.is_decided else 'r'}-{self.id}-{self.folder}"


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
