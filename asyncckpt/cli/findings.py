"""What a command found out about one step: a fact, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

from asyncckpt.errors import (
    CheckpointError,
    ConflictError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)

Fact = TypeVar("Fact", covariant=True)


@dataclass(frozen=True)
class Finding(Generic[Fact]):
    """Exactly one of fact and error is set."""

    step: int
    fact: Fact | None = None
    error: CheckpointError | None = None

    @property
    def is_sound(self) -> bool:
        return self.error is None


class ExitCode(IntEnum):
    """If several apply, the smallest except OK is returned."""

    OK = 0
    DAMAGED = 1
    USAGE = 2
    NOT_FOUND = 3
    UNREADABLE = 4
    FAILED = 5
    HELD = 6
    DIFFERENT = 7


EXIT_CODES = """\
Exit codes: 0 all is well; 1 a checkpoint is damaged; 2 wrong usage; 3 there is no such checkpoint, directory, table \
or row; 4 a checkpoint needs another version of asyncckpt, or cannot be converted; 5 the operating system refused; 6 \
the directory is in use by another process, or the target already exists; 7 the checkpoints differ (diff).
"""


def code_of(error: CheckpointError) -> ExitCode:
    match error:
        case CorruptError():
            return ExitCode.DAMAGED
        case UsageError():
            return ExitCode.USAGE
        case NotFoundError():
            return ExitCode.NOT_FOUND
        case IncompatibleError() | UnsupportedError():
            return ExitCode.UNREADABLE
        case ConflictError():
            return ExitCode.HELD
    return ExitCode.FAILED


def worst_code(findings: Sequence[Finding[object]]) -> ExitCode:
    return min((code_of(finding.error) for finding in findings if finding.error is not None), default=ExitCode.OK)
