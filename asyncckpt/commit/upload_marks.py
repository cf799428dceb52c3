"""Upload marks: an empty file `manifests/.u-<step>-<attempt>` says that this attempt goes to an object store, too.

1. A writer that uploads makes the mark right before the rename that commits the attempt; both are durable together.
2. Whoever uploads the attempt removes its mark behind that. A crash before leaves it, and the next writer goes on.
3. Until then retention keeps the step (judge.py); who names the step may remove it.
4. The mark of an attempt that is not there, because it failed or was removed, counts for nothing. A sweep removes it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from asyncckpt.commit.removal import remove_each
from asyncckpt.commit.root import WriteRoot
from asyncckpt.format.names import Attempt, attempt_of_upload_mark, upload_mark_name


def mark_upload(root: WriteRoot, attempt: Attempt) -> None:
    root.manifests.make_empty(upload_mark_name(attempt))


def unmark_upload(root: WriteRoot, attempt: Attempt) -> None:
    """Remove a mark. Not synced: one that comes back is of what is in the store already."""
    root.manifests.remove_file(upload_mark_name(attempt))


def uploads_among(names: Iterable[str]) -> list[Attempt]:
    """Return the attempts that are to be uploaded, in the order of their steps, given the names in manifests/."""
    found = [attempt for name in names if (attempt := attempt_of_upload_mark(name)) is not None]
    return sorted(found, key=lambda attempt: attempt.step)


def remove_upload_marks(root: WriteRoot, listed: Iterable[str], keep_attempts: Container[str]) -> list[str]:
    """Remove the marks among these whose attempts have no folder and are not running; return their names."""
    marked = [attempt for attempt in uploads_among(listed) if attempt.id not in keep_attempts]
    folders = set(root.data.names()) if marked else set()  # Behind the marks, which are made later.
    names = [upload_mark_name(attempt) for attempt in marked if attempt.directory not in folders]
    return remove_each(root, names)
