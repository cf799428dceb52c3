"""Read the log of file operations that shim.c writes."""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from pathlib import Path

from shim import OpKind

_RECORD = struct.Struct("<iiqqqIIII")


class Kill(IntEnum):
    """Whether the process was killed at this operation."""

    NO = 0
    BEFORE = 1
    AFTER = 2


@dataclass(frozen=True)
class DiskOp:
    """One operation. `size` is how many bytes a transfer moved, the length of a cut, or the flags of an open."""

    kind: OpKind
    error: int
    number: int
    offset: int
    size: int
    path: str
    target: str
    data: bytes
    killed: Kill

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def was_done(self) -> bool:
        return self.error == 0 and self.killed is not Kill.BEFORE

    def __str__(self) -> str:
        if self.kind is OpKind.MARK:
            return f"acknowledgement of step {self.number}"
        name = "/".join(Path(self.path).parts[-2:])
        more = f" -> {Path(self.target).name}" if self.target else ""
        reason = f" ({errno.errorcode.get(self.error, self.error)})" if self.error else ""
        return f"{self.number} {self.kind.name} {name}{more}{reason}"


def read_log(path: Path) -> list[DiskOp]:
    """All operations in the order they were logged."""
    raw = path.read_bytes()
    operations = []
    at = 0
    while at < len(raw):
        kind, error, number, offset, size, path_bytes, target_bytes, data_bytes, killed = _RECORD.unpack_from(raw, at)
        at += _RECORD.size
        ends = [at, at + path_bytes, at + path_bytes + target_bytes, at + path_bytes + target_bytes + data_bytes]
        name, target, data = (raw[begin:end] for begin, end in pairwise(ends))
        at = ends[-1]
        operations.append(
            DiskOp(OpKind(kind), error, number, offset, size, name.decode(), target.decode(), data, Kill(killed))
        )
    return operations


def begin_of_disturbed(log: Sequence[DiskOp], *, base_count: int, from_commit: bool) -> int:
    """The log line behind the last acknowledgement of a base of that many acts; or the publication after it."""
    marks = [index for index, operation in enumerate(log) if operation.kind is OpKind.MARK]
    begin = marks[base_count - 1] + 1 if base_count else 0
    if from_commit:
        return next(index for index in range(begin, len(log)) if log[index].kind is OpKind.RENAME)
    return begin
