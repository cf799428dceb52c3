"""Put damaged steps aside, where nothing looks for checkpoints: their numbers are free then, and nothing is removed.

    damaged/000000000120-<id>/000000000120.json          its manifests, pin and marks
    damaged/000000000120-<id>/000000000120-<attempt>/    what its attempts have written

The data go first: a crash in between leaves a manifest without data, which is damaged as before, and is put aside next
time. In a store the manifest is copied, and then removed; the data stay where they are until somebody collects garbage.
"""

from __future__ import annotations

import errno
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from asyncckpt.commit.root import CheckpointRoot, WriteRoot
from asyncckpt.errors import IOFailedError, NotFoundError
from asyncckpt.format import limits
from asyncckpt.format.names import parse

if TYPE_CHECKING:
    from asyncckpt.commit.store_root import StoreRoot

ASIDE_DIR = "damaged"
_KINDS = ("manifest", "compacted", "pin", "upload")


def put_aside(root: WriteRoot, steps: Iterable[int]) -> list[str]:
    """Put these steps aside, durably, the newest first; return where they are now. For whoever holds LOCK.

    IOFailedError, ConflictError.
    """
    root.check_in_place("damaged checkpoints were put aside")
    found: list[str] = []
    for step in sorted(steps, reverse=True):
        known = ((name, parse(name)) for name in root.manifests.names())
        files = [name for name, about in known if about is not None and about.kind in _KINDS and about.step == step]
        files.sort(key=lambda name: name.endswith(".json"))  # The manifests last: without them nothing is looked for.
        place = f"{step:012d}-{uuid.uuid4().hex}"
        if not files:
            continue
        if isinstance(root, CheckpointRoot):
            _move(root, step, files, place)
        else:
            _copy(root, files, place)
        found.append(f"{root.path}/{ASIDE_DIR}/{place}")
    return found


def _move(root: CheckpointRoot, step: int, files: Sequence[str], place: str) -> None:
    with root.root.child(ASIDE_DIR, create=True) as aside, aside.make_folder(place) as folder:
        for above in (root.root, aside):
            above.sync()
        attempts = ((name, parse(name)) for name in root.data.names())
        folders = [name for name, of in attempts if of is not None and of.kind == "attempt" and of.step == step]
        for names, own in ((folders, root.data), (files, root.manifests)):
            for name in names:
                try:
                    own.move(name, name, to=folder)
                except IOFailedError as error:
                    if error.errno != errno.ENOENT:  # A mark that an upload has removed meanwhile.
                        raise
            folder.sync()
            own.sync()


def _copy(root: StoreRoot, files: Sequence[str], place: str) -> None:
    for name in files:
        with suppress(NotFoundError):
            raw = root.manifests.read_file(name, bytes_max=limits.MANIFEST_BYTES_MAX)
            root.store.put_new(f"{ASIDE_DIR}/{place}/{name}", raw)
            root.store.check_kept(f"{ASIDE_DIR}/{place}/{name}", raw)
            root.manifests.remove_file(name)
    root.remembered.look()
