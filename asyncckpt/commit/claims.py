"""Which steps this process is saving or compacting now, in which directories.

A step is claimed before anything is made for it, and released when its commit has ended or was given up. So no step is
saved twice at once, "the next step" counts those in flight, and a sweep knows the attempts whose folders must stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncckpt.commit.discover import committed_steps, is_committed
from asyncckpt.commit.root import ReadRoot, WriteRoot
from asyncckpt.errors import ConflictError
from asyncckpt.format.names import Attempt
from asyncckpt.guard import Guard
from asyncckpt.system import register_at_fork


@dataclass(frozen=True)
class Claim:
    """A step of the directory with this identity, and the attempt that is made at it.

    parents: the steps that it builds upon directly; retention must keep them. is_next: no step was asked for.
    """

    place: tuple[Any, ...]
    kind: Literal["save", "compaction"]
    attempt: Attempt
    parents: list[int] = field(default_factory=list)
    is_next: bool = False

    @property
    def step(self) -> int:
        return self.attempt.step

    def release(self) -> None:
        """Let others have the step. Idempotent, and takes no lock: finalizers call it."""
        claims.held.pop(self.attempt.id, None)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Claims(Container[str]):
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
            with self._guard:
                is_free = chosen not in self._steps(place, "save")
                claim = self._hold(Claim(place, "save", attempt, is_next=step is None)) if is_free else None
            if claim is not None:
                with contextlib.ExitStack() as held:
                    held.enter_context(claim)
                    # Behind the claim: who has had one of this step has committed it by now, or never will.
                    if not is_committed(seen, chosen) or (root.look_anew() and not is_committed(seen, chosen)):
                        held.pop_all()
                        return claim
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
            return self._hold(Claim(place, "compaction", Attempt.new(step)))

    def needed(self, place: tuple[Any, ...]) -> set[int]:
        """Return the steps that are being saved or compacted, and those that saves build upon."""
        claimed = [claim for claim in list(self.held.values()) if claim.place == place]
        return {step for claim in claimed for step in (claim.step, *claim.parents)}

    def _steps(self, place: tuple[Any, ...], kind: str) -> list[int]:
        return [claim.step for claim in list(self.held.values()) if (claim.place, claim.kind) == (place, kind)]

    def _hold(self, claim: Claim) -> Claim:
        self.held[claim.attempt.id] = claim
        return claim

    def forget(self) -> None:
        """Start anew in a forked child, where nothing is saved."""
        self.held = {}

    def __contains__(self, attempt: object) -> bool:
        return attempt in self.held


claims = Claims()
register_at_fork(after_in_child=claims.forget)


def step_exists(root: ReadRoot, step: int) -> ConflictError:
    return ConflictError(
        f"step {step} exists already in {str(root.path)!r}",
        hint="steps are never overwritten: save another step, or remove that checkpoint first",
    )
