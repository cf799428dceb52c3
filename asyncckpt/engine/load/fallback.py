"""What a load does when a step is damaged, and an older one may be loaded in its place."""

from __future__ import annotations

from collections.abc import Mapping

from asyncckpt.commit.discover import committed_steps
from asyncckpt.commit.root import ReadRoot
from asyncckpt.errors import CorruptError, IncompatibleError


def older_step(root: ReadRoot, passed_over: Mapping[int, Exception]) -> int:
    """Return the step to try next. CorruptError when none is left."""
    last = min(passed_over)
    older = [step for step in committed_steps(root) if step < last]
    if not older:
        what = f"no checkpoint in {str(root.path)!r} is sound"
        raise CorruptError(what, found=list(passed_over)) from passed_over[last]
    return older[-1]


def does_not_fit(damaged: int, step: int, error: IncompatibleError) -> CorruptError:
    """Return the error of a load that targets may hold parts of a damaged step after, and an older one does not fit."""
    what = f"step {damaged} is damaged, targets may hold parts of it, and step {step} does not match this state"
    return CorruptError(what, hint=error.hint)
