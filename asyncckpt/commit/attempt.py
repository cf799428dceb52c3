"""An attempt at a step: its claim, and the proof of its manifest. root.py has how that gets to its place.

A step is claimed before anything is made for it, and released when its commit has ended or was given up. So no step is
saved twice at once, "the next step" counts those in flight, and a sweep knows the attempts whose folders must stay.

Before a manifest is published, the readers' own code decodes it, unless that of a plan of the same structure was
decoded before: then all that differs (digests, sizes that follow from rows, files) is written by the same code from the
same plan, and only the head, with the plain values and the files, is decoded. Files are looked at for every commit: see
transaction.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from asyncckpt.commit.discover import committed_steps, is_committed
from asyncckpt.commit.root import ReadRoot, WriteRoot
from asyncckpt.errors import ConflictError, CorruptError
from asyncckpt.format.head import ManifestHead, decode_head
from asyncckpt.format.names import Attempt
from asyncckpt.format.read_manifest import decode_manifest
from asyncckpt.format.write_manifest import BodyTemplate, PartText, encode_manifest
from asyncckpt.signals import Guard
from asyncckpt.system import register_at_fork

PROVEN_MAX = 64
_NO_BODY = BodyTemplate(text=b'"tables":[],"tree":{},"blocks":[]', holes=np.empty(0, dtype=np.int64))
_NO_DIGESTS = np.empty((0, 16), dtype=np.uint8)

# Structures of manifests that were decoded, by kind and rank; the oldest are forgotten first.
_proven: dict[tuple[str | None, ...], None] = {}


@dataclass(frozen=True)
class Claim:
    """A step of the directory with this identity, and the attempt that is made at it.

    parents: the steps that it is directly based on; retention must keep them. is_next: no step was asked for. missing:
    the ranks in turn whose parts have not come, once one has.
    """

    place: tuple[Any, ...]
    kind: Literal["save", "compaction"]
    attempt: Attempt
    parents: list[int] = field(default_factory=list)
    is_next: bool = False
    missing: list[int] = field(default_factory=list)

    @property
    def step(self) -> int:
        return self.attempt.step

    def release(self) -> None:
        """Let others have the step. Idempotent, and takes no lock: finalizers call it."""
        if claims.held.get(self.attempt.id) is self:
            claims.held.pop(self.attempt.id, None)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Claims:
    """All claims of this process, by the ids of their attempts."""

    def __init__(self) -> None:
        self._guard = Guard()
        self.held: dict[str, Claim] = {}

    def save(self, root: WriteRoot, step: int | None, attempt_of: Callable[[int], Attempt] = Attempt.new) -> Claim:
        """Claim a step to save, or the next: one more than the newest that is committed or being saved here.

        attempt_of: which attempt it is: an import goes on with one that was killed. UsageError; ConflictError for a
        step that exists, as far as a call may look, or is being saved.
        """
        place, seen = root.root.identity, root.in_calls
        while True:
            others = self._steps(place, "save")
            chosen = max([-1, *others, *committed_steps(seen)[-1:]]) + 1 if step is None else step
            attempt = attempt_of(chosen)
            claim = Claim(place, "save", attempt, is_next=step is None)
            with self._guard:
                is_taken = chosen in self._steps(place, "save")
                if not is_taken:
                    self.held[attempt.id] = claim
            try:
                # After the claim: who has had one of this step has committed it by now, or never will.
                is_taken = is_taken or (is_committed(seen, chosen) and not _is_gone(root, chosen))
            except BaseException:
                claim.release()
                raise
            if not is_taken:
                return claim
            claim.release()
            if step is not None:
                raise step_exists(root, step)

    def compaction(self, root: WriteRoot, step: int) -> Claim:
        """Claim a step to compact, which retention keeps, unless it has announced its removal before (removal.py).

        ConflictError when it is being compacted already.
        """
        place = root.root.identity
        with self._guard:
            if step in self._steps(place, "compaction"):
                raise ConflictError(f"step {step} of {str(root.path)!r} is being compacted already")
            claim = Claim(place, "compaction", Attempt.new(step))
            self.held[claim.attempt.id] = claim
            return claim

    def needed(self, place: tuple[Any, ...]) -> set[int]:
        """Return the steps that are being saved or compacted, and the bases of saves."""
        claimed = [claim for claim in list(self.held.values()) if claim.place == place]
        return {step for claim in claimed for step in (claim.step, *claim.parents)}

    def _steps(self, place: tuple[Any, ...], kind: str) -> list[int]:
        return [one.attempt.step for one in list(self.held.values()) if (one.place, one.kind) == (place, kind)]

    def forget(self) -> None:
        """Start over in a forked child, where nothing is saved."""
        self.held = {}


def _is_gone(root: WriteRoot, step: int) -> bool:
    """Return whether a step that a call remembers is gone by now: in a store, which is asked."""
    return root.look_anew() and not is_committed(root.in_calls, step)


claims = Claims()
register_at_fork(after_in_child=claims.forget)


def step_exists(root: ReadRoot, step: int) -> ConflictError:
    return ConflictError(
        f"step {step} already exists in {str(root.path)!r}",
        hint="steps are never overwritten: save another step, or remove that checkpoint first",
    )


@dataclass(frozen=True)
class Draft:
    """What a manifest is made of. body and digests are those of rank 0, others the parts of ranks 1, 2, ...

    structures: of every rank a digest of what its part says beside digests and sizes; None where that is not known.
    Empty: of none. holds_all: no filter has left anything out, so each tensor that a rank has must be there.
    """

    head: ManifestHead
    body: BodyTemplate
    digests: NDArray[np.uint8]
    others: Sequence[PartText] = ()
    structures: Sequence[str | None] = ()
    holds_all: bool = False


def body_structure(body: BodyTemplate) -> str:
    """Return a digest of what a body says, but the digests of blocks."""
    return xxhash.xxh3_128_hexdigest(body.text)


def encode_proven(draft: Draft) -> bytearray:
    """Return the bytes of a manifest that readers accept. CorruptError, UsageError; ConflictError of ranks."""
    head = draft.head
    raw = encode_manifest(head, draft.body, draft.digests, draft.others)
    known = (head.kind, *draft.structures)
    is_known = len(draft.structures) == head.ranks_count and None not in draft.structures
    if is_known and known in _proven:
        decode_head(bytes(encode_manifest(replace(head, ranks_count=1), _NO_BODY, _NO_DIGESTS)), head.file_name)
    else:
        try:
            manifest = decode_manifest(bytes(raw), head.file_name)
        except CorruptError as error:
            if head.ranks_count == 1:
                raise
            from asyncckpt.commit.disagreement import disagreement  # Looked for when ranks do not fit together.

            conflict = disagreement(bytes(raw), head.file_name)
            if conflict is not None:
                raise conflict from error
            raise
        if draft.holds_all:
            from asyncckpt.commit.disagreement import check_written  # Of saves by several ranks.

            check_written(manifest)
    if is_known:
        _proven.pop(known, None)
        _proven[known] = None
        for oldest in list(_proven)[:-PROVEN_MAX]:
            _proven.pop(oldest, None)
    return raw
