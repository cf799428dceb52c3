"""Memory cgroups of our own; where none can be made, the test is skipped."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
MIB = 1 << 20


@dataclass(frozen=True)
class Group:
    """A memory cgroup of our own."""

    folder: Path
    limit: str
    peak: str

    @staticmethod
    @contextlib.contextmanager
    def made(name: str) -> Iterator[Group]:
        is_v1 = (V1 / "memory.limit_in_bytes").exists()
        files = ("memory.limit_in_bytes", "memory.max_usage_in_bytes") if is_v1 else ("memory.max", "memory.peak")
        group = Group((V1 if is_v1 else V2) / f"{name}-{os.getpid()}", *files)
        try:
            group.folder.mkdir()
        except OSError as error:
            pytest.skip(f"no cgroup can be made here: {error}")
        try:
            if not (group.folder / group.limit).exists():
                pytest.skip(f"cgroups of {group.folder.parent} have no limit of memory")
            yield group
        finally:
            group.folder.rmdir()

    def command(self, *, limit: int | None = None) -> tuple[str, ...]:
        """Limit it; return the start of a command that runs in it."""
        if limit is not None:
            (self.folder / self.limit).write_text(str(limit))
        return ("sh", "-c", f'echo $$ > {self.folder}/cgroup.procs; exec "$@"', "sh")

    @property
    def peak_bytes(self) -> int:
        """The most that it has used."""
        return int((self.folder / self.peak).read_text())
