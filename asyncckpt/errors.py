"""The one error tree.

Every failure that a user can meet is a CheckpointError. Its message says what failed, on what, what was expected and
found, and often what to do. Foreign errors (OSError, struct.error, a filter's own) are
wrapped once, at the storage or native door, and stay reachable as `__cause__`.

    CheckpointError     CorruptError  IncompatibleError  NotFoundError  UnsupportedError  ConflictError  UsageError
                        IndeterminateError  IOFailedError  SaveCancelledError  DeadlineError  DeviceError  PeerError
    ConflictError       SaveInProgressError
    UsageError          FilterError
    PeerError           PeerInDoubtError, which is an IndeterminateError too
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

TEXT_CHARACTERS_MAX = 2000
FILTER_HINT = "nothing was saved; see the traceback of the filter itself"
_UNSET: Any = object()
_PACKAGE = os.path.join(os.path.dirname(__file__), "")
_OUR_FRAMES = (
    _PACKAGE,
    contextlib.__file__,
    importlib.__file__,
)  # Its context managers and decorators are between ours.
_OF_IMPORTS = "<frozen importlib._bootstrap"


class CheckpointError(Exception):
    """Base of all errors of this library.

    `what` failed; `found` is shown with repr and `expected` too, but a str there is prose; `hint` says what to do.
    """

    def __init__(self, what: str, *, expected: Any = _UNSET, found: Any = _UNSET, hint: str | None = None) -> None:
        self.what = what
        self.expected = None if expected is _UNSET else expected
        self.found = None if found is _UNSET else found
        self.hint = hint
        parts = [_shortened(what)]
        if found is not _UNSET:
            parts.append(f"found {_shown(found)}")
        if expected is not _UNSET:
            parts.append(f"expected {_shortened(expected) if isinstance(expected, str) else _shown(expected)}")
        message = ", ".join(parts)
        super().__init__(f"{message} ({hint})" if hint else message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors travel between processes, with their text and plain facts: other ranks wait for them there."""
        facts = {name: fact for name, fact in self.__dict__.items() if isinstance(fact, (str, int, float, type(None)))}
        return received, (type(self), str(self), facts)


class Words(str):
    """Text that a message shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _shown(value: Any) -> str:
    if not isinstance(value, type) or value is type(None):
        return _shortened(repr(None if value is type(None) else value))
    return f"{'an' if value.__name__[:1] in 'AEIOUaeiou' else 'a'} {value.__name__}"


def _shortened(text: str) -> str:
    """Return a text without its middle if it is very long, as a name in a foreign file may be."""
    half = TEXT_CHARACTERS_MAX // 2
    return text if len(text) <= 2 * half else f"{text[:half]} ... {text[-half:]}"


def one_line(error: BaseException) -> str:
    """Return the text of a foreign error as one line, for a message of ours."""
    return " ".join(str(error).split("\n"))


def received(kind: type[CheckpointError], message: str, facts: dict[str, Any]) -> CheckpointError:
    """Make an error of another process."""
    error = kind.__new__(kind, message)
    Exception.__init__(error, message)
    error.__dict__.update({"expected": None, "found": None, **facts})
    if isinstance(error, IndeterminateError):
        error.resolve = _resolve_on_rank_0
    return error


def _resolve_on_rank_0() -> bool:
    raise UsageError("this error came from another process", hint="call resolve() there, or look for the step")


class CorruptError(CheckpointError):
    """Bytes on disk are not what was written."""

    def say_where(self, path: object) -> None:
        """Say in which directory or store, too."""
        where = repr(str(path))
        if where not in str(self) and f"{path}/" not in str(self):
            self.args, self.what = (f"in {where}: {self}",), f"in {where}: {self.what}"


class IncompatibleError(CheckpointError):
    """The checkpoint was written by a newer version, or does not fit the target it is loaded into."""


class NotFoundError(CheckpointError):
    """There is no such checkpoint."""


class UnsupportedError(CheckpointError):
    """A dtype, layout or feature that this version does not handle."""


class ConflictError(CheckpointError):
    """Another writer holds this directory, or this step exists already."""


class SaveInProgressError(ConflictError):
    """A save or load of this process is in flight; says which step, which path and how old it is."""


class IndeterminateError(CheckpointError):
    """The manifest was published but its durability could not be confirmed.

    `resolve()` looks again: True when the checkpoint is there and durable, False when it is not there.
    """

    def __init__(self, what: str, *, resolve: Callable[[], bool], hint: str | None = None) -> None:
        super().__init__(what, hint=hint)
        self.resolve = resolve


class IOFailedError(CheckpointError):
    """The operating system refused; `errno` is its reason (None when there is none)."""

    def __init__(self, what: str, *, errno: int | None = None, hint: str | None = None) -> None:
        super().__init__(what, hint=hint)
        self.errno = errno


class UsageError(CheckpointError):
    """An argument is wrong, or a call came out of order."""


def must_be(
    name: str, rule: Any, value: Any, *, kind: type[CheckpointError] = UsageError, hint: str | None = None
) -> CheckpointError:
    """Return the error for a value that breaks its rule: words, a class, or a tuple of choices."""
    words = f"one of {', '.join(map(_shown, rule))}" if isinstance(rule, tuple) else rule
    words = words if isinstance(words, str) else _shown(words)
    error = kind(f"{name} must be {words}; got {_shown(value)}", hint=hint)
    error.expected, error.found = rule, value
    return error


def nearest(name: object, names: Iterable[object]) -> str | None:
    """Return the hint for a name that is not among those known: one that looks like it, if there is any."""
    from difflib import get_close_matches

    near = get_close_matches(str(name), map(str, names), 1)
    return f"did you mean {near[0]!r}?" if near else None


class FilterError(UsageError):
    """A filter function raised or returned nonsense; nothing was committed."""


class SaveCancelledError(CheckpointError):
    """The save was cancelled before its commit."""


class DeadlineError(CheckpointError, TimeoutError):
    """A wait ended before what it waited for."""


class DeviceError(CheckpointError):
    """An accelerator or its runtime failed while it copied for a save or a load."""


class PeerError(CheckpointError):
    """Another rank of the job failed, died or went silent, so the save of all ranks was not committed.

    `rank` is the rank at fault (None when it is not known), `cause` its error or what was waited for, as text.
    """

    def __init__(self, what: str, *, rank: int | None, cause: str, hint: str | None = None) -> None:
        # By name: for PeerInDoubtError the next class in line is IndeterminateError, which wants more.
        if hint is None and rank is not None and not cause.endswith(")"):  # Else the cause has a hint.
            hint = f"see the log of rank {rank}, and whether it still runs"
        CheckpointError.__init__(self, f"{what}: {cause}", hint=hint)
        self.rank = rank
        self.cause = cause


class PeerInDoubtError(PeerError, IndeterminateError):
    """This rank did its part and did not learn the outcome: the checkpoint may or may not be committed.

    `resolve()` looks again: True when the checkpoint is there and durable, False when it is not there (so far: a
    coordinator that still lives may publish it later).
    """

    def __init__(
        self, what: str, *, rank: int | None, cause: str, resolve: Callable[[], bool], hint: str | None = None
    ) -> None:
        PeerError.__init__(self, what, rank=rank, cause=cause, hint=hint)
        self.resolve = resolve


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the line of the caller's program that led here: the nearest one outside of this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*_OUR_FRAMES, _OF_IMPORTS)):
        frame = frame.f_back
        level += not frame.f_code.co_filename.startswith(_OF_IMPORTS)  # `warnings` does not count these either.
    warnings.warn(text, category, stacklevel=level)


def with_earlier(error: BaseException) -> str:
    """Return the text of an error, and those of earlier saves that are its causes: no traceback shows them."""
    told, seen = str(error), [error]
    while (cause := seen[-1].__cause__) is not None and cause not in seen:
        told += f"; before that: {cause}" if isinstance(cause, CheckpointError) else ""
        seen.append(cause)
    return told


@contextmanager
def closing_beside(error: BaseException | None, what: str) -> Iterator[None]:
    """Close in this block, at the end of a `with` block that raised `error`, if any: then an error of closing becomes a
    note of it. It is printed where notes are not: before Python 3.11, at an exit, and in a cancelled task.
    """
    try:
        yield
    except Exception as later:
        if error is None:
            raise
        if isinstance(error, (Exception, KeyboardInterrupt)) and hasattr(error, "add_note"):
            error.add_note(f"and {what}: {with_earlier(later)}")
        else:
            print(f"asyncckpt: {what}: {with_earlier(later)}", file=sys.stderr)
