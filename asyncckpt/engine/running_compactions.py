"""Which compactions this process runs, so that a save beside one does not sweep its folder, and none runs twice."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.errors import ConflictError
from asyncckpt.format.names import Attempt


class RunningCompactions:
    """Compactions of this process that are under way: by directory and step, with the attempt of each."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._attempts: dict[tuple[int, int, int], str] = {}

    @contextmanager
    def enter(self, root: CheckpointRoot, attempt: Attempt) -> Iterator[None]:
        """ConflictError when this step is being compacted already."""
        status = os.fstat(root.root.fd)
        key = (status.st_dev, status.st_ino, attempt.step)
        with self._guard:
            if key in self._attempts:
                raise ConflictError(f"step {attempt.step} of {str(root.path)!r} is being compacted already")
            self._attempts[key] = attempt.id
        try:
            yield
        finally:
            with self._guard:
                self._attempts.pop(key, None)

    def attempts(self) -> tuple[str, ...]:
        """Attempts that are under way now."""
        with self._guard:
            return tuple(self._attempts.values())

    def beside(self, attempt: Attempt) -> Collection[str]:
        """This attempt and all compactions, those too that begin later: what a sweep must leave alone, asked by `in`.

        A compaction is in it before it makes its folder, and until its manifest is published or its folder is given up.
        """
        return _Beside(attempt.id, self)

    def forget(self) -> None:
        """Start anew in a forked child, where no compaction runs."""
        self._guard = threading.Lock()
        self._attempts = {}


class _Beside(Collection[str]):
    """An attempt, and whatever runs when it is asked."""

    def __init__(self, attempt: str, running: RunningCompactions) -> None:
        self._attempt = attempt
        self._running = running

    def __contains__(self, attempt: object) -> bool:
        return attempt in self._now()

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def _now(self) -> tuple[str, ...]:
        return (self._attempt, *self._running.attempts())


running_compactions = RunningCompactions()
os.register_at_fork(after_in_child=running_compactions.forget)
