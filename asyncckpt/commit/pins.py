"""Pins: retention keeps a step while an empty file `manifests/<step>.pin` is there.

Whoever pins needs no LOCK, so it works beside a job that trains. It makes the file durable, and only then looks whether
nobody is about to remove the step, and it is there. Who removes looks for pins when that is announced (removal.py): if
the file was there by then, it is seen, and the step stays; if it came later, who pins sees the mark, and says so.

Who pins in vain leaves the file, for another one may have pinned the step by it meanwhile. So may a crash. The pin of a
step that is gone counts for nothing, and the next sweep removes it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable

from asyncckpt.commit.discover import is_committed, read_head
from asyncckpt.commit.removal import being_removed, remove_each
from asyncckpt.commit.root import ReadRoot, WriteRoot
from asyncckpt.errors import ConflictError, IOFailedError
from asyncckpt.format.names import pin_name, step_of_pin


def pins_among(names: Iterable[str]) -> set[int]:
    """Return the steps that are pinned, given the names in manifests/; some may be gone."""
    return {step for name in names if (step := step_of_pin(name)) is not None}


def is_pinned(root: ReadRoot, step: int) -> bool:
    return root.manifests.exists(pin_name(step))


def pin_step(root: WriteRoot, step: int) -> None:
    """Pin a step, durably. NotFoundError, ConflictError for one that is being removed."""
    read_head(root, step)  # A damaged one, or none, leaves no file.
    try:
        root.manifests.make_empty(pin_name(step))
    except IOFailedError as error:
        if error.errno != errno.EEXIST:
            raise
    root.manifests.sync()
    going = being_removed(root)  # Before the look at the step: a removal that ends in between has taken its mark away.
    if read_head(root, step).folder_name in going:
        raise ConflictError(f"step {step} of {str(root.path)!r} is being removed", hint="if it stays, pin it again")


def unpin_step(root: WriteRoot, step: int) -> bool:
    """Let retention have a step again, durably; return whether it was pinned."""
    was_pinned = root.manifests.remove_file(pin_name(step))
    root.manifests.sync()
    return was_pinned


def remove_pins(root: WriteRoot, steps: Iterable[int]) -> list[str]:
    """Remove the pins of those of the steps that are gone; return the names of their files."""
    return remove_each(root, [pin_name(step) for step in steps if not is_committed(root, step)])
