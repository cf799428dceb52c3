"""What an import reads, files of another library: apart from its target, and still from its beginning to its commit.

They have no digests of ours. So what the system says of them (place, size, times) is asked for before the first is
opened, and again when all is copied: where it says anything else, what was copied may be half of one checkpoint and
half of another.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from asyncckpt.errors import CheckpointError, CorruptError, UsageError
from asyncckpt.model.enough_memory import enough_memory
from asyncckpt.model.store_url import Place, StoreUrl
from asyncckpt.storage.directory import io_failed

Status = tuple[int, int, int, int, int]


class ImportSource:
    """Files, and all that is in folders, as they are now."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self.statuses = statuses(paths)

    def check_still(self) -> None:
        """Raise CorruptError if any of them is another one by now."""
        now = statuses(self._paths)
        changed = [path for path in sorted({*now, *self.statuses}) if now.get(path) != self.statuses.get(path)]
        if changed:
            raise CorruptError(
                f"{str(changed[0])!r} changed while it was imported, and nothing is committed",
                hint="import it again when no process writes to it",
            )


def statuses(paths: Sequence[Path]) -> dict[Path, Status]:
    """Return the status of files, and of all that is in folders. Missing ones, such as dangling links, are left out."""
    found: dict[Path, Status] = {}
    for path in paths:
        below = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
        for each in (path, *below):
            with suppress(OSError):
                status = each.stat()
                facts = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                if stat.S_ISDIR(status.st_mode):  # What is in a folder has facts of its own.
                    facts = (0, 0, 0)
                found[each] = (status.st_dev, status.st_ino, *facts)
    return found


def check_is_apart(source: Path, target: Place) -> None:
    """Raise UsageError for a target that is the folder of a source, or in it: that would not stay as it is."""
    if isinstance(target, StoreUrl):
        return
    real, place = (Path(os.path.realpath(path)) for path in (source, target))
    if place == real or real in place.parents:
        raise UsageError("an import cannot go into its own source", found=str(target), expected="another place")


@contextmanager
def reading(source: Path) -> Iterator[None]:
    """Raise what the system says while a source is read as IOFailedError; a file may ask for any memory."""
    try:
        with enough_memory(f"what {str(source)!r} says that it holds"):
            yield
    except CheckpointError:
        raise
    except OSError as error:
        raise io_failed(f"{str(source)!r} cannot be read", error) from error
