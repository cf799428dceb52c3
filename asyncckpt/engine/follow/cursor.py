"""The progress of a follower: a step, and the digests by which later deltas may name it; kept in a small file.

    {"format": "asyncckpt-cursor", "version": 1, "step": 120, "digests": ["<of its manifest>", ...]}

The file is replaced atomically: write a new one beside it, fsync it, rename it over the old one, fsync the folder. So
it holds one step or the next, whenever the process dies.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from asyncckpt import system
from asyncckpt.errors import CorruptError, IncompatibleError, NotFoundError, UsageError
from asyncckpt.format.limits import STEP_MAX
from asyncckpt.format.manifest import Manifest
from asyncckpt.format.strict_json import Fields, dumps, loads
from asyncckpt.storage.directory import Directory, at, io_failed

CURSOR_FORMAT = "asyncckpt-cursor"
CURSOR_VERSION = 1
CURSOR_BYTES_MAX = 4096
_DIGESTS_MAX = 2
_HINT = "remove the file to begin with the oldest step, or give the last step as after="


@dataclass(frozen=True)
class SeenStep:
    """A step that a consumer has finished.

    digests: those of its manifest and of the manifest that it replaces, if any; empty if unknown. versions: those of
    files that were found to be that manifest, so that they are read once.
    """

    step: int
    digests: tuple[str, ...]
    versions: set[object] = field(default_factory=set, compare=False)

    @staticmethod
    def of(manifest: Manifest) -> SeenStep:
        replaced = () if manifest.head.replaces is None else (manifest.head.replaces,)
        return SeenStep(step=manifest.step, digests=(manifest.digest, *replaced))


class CursorFile:
    """A cursor on disk, for one follower at a time."""

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            raise UsageError("cursor is a folder", found=str(path), expected="the path of a small file of your own")
        self.path = path

    def read(self) -> SeenStep | None:
        """Return the last step that was written; None if there is no file.

        Raises CorruptError, IncompatibleError, IOFailedError, NotFoundError for a missing folder.
        """
        owner = f"cursor {str(self.path)!r}"
        with Directory.open(self.path.parent) as folder:
            try:
                raw = folder.read_file(self.path.name, bytes_max=CURSOR_BYTES_MAX)
            except NotFoundError:
                return None
        try:
            return _decoded(raw, owner)
        except CorruptError as error:
            raise CorruptError(error.what, hint=_HINT) from error

    def write(self, seen: SeenStep) -> None:
        """Replace the file durably. Raises IOFailedError."""
        record = {
            "format": CURSOR_FORMAT,
            "version": CURSOR_VERSION,
            "step": seen.step,
            "digests": list(seen.digests),
        }
        temporary = f".{self.path.name}.new"
        with Directory.open(self.path.parent) as folder:
            folder.remove_file(temporary)  # Left by a process that died.
            fd, _ = folder.create_file(temporary)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(dumps(record) + b"\n")
                    file.flush()
                    system.fsync(file.fileno())
                at.rename(temporary, self.path.name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
            except OSError as error:
                with contextlib.suppress(OSError):
                    at.unlink(temporary, dir_fd=folder.fd)
                raise io_failed(f"cursor {str(self.path)!r} cannot be written", error) from error
            folder.sync()


def _decoded(raw: bytes, owner: str) -> SeenStep:
    fields = Fields(loads(raw, owner=owner), owner=owner, where="cursor")
    if fields.text("format") != CURSOR_FORMAT:
        raise CorruptError(f"{owner} has another format", found=fields.text("format"), expected=CURSOR_FORMAT)
    version = fields.integer("version", at_least=1)
    if version > CURSOR_VERSION:
        raise IncompatibleError(f"{owner} was written by a newer version", found=version, expected=CURSOR_VERSION)
    step = fields.integer("step", at_most=STEP_MAX)
    return SeenStep(step=step, digests=fields.texts("digests", count_max=_DIGESTS_MAX))
