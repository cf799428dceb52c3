"""The disk that all ranks share, and what must hold of it at every moment."""

from __future__ import annotations

from asyncckpt.format.names import Attempt


class Violation(AssertionError):
    """The protocol has broken a promise."""


class Disk:
    """Folders of attempts with the files of ranks, and manifests."""

    def __init__(self, ranks_count: int) -> None:
        self._ranks_count = ranks_count
        self.calls: dict[str, int] = {}  # Of an attempt's id, the call that made it.
        self.manifests: dict[int, str] = {}  # Of a step, the id of the attempt that it is.
        self._files: dict[str, set[int]] = {}
        self._is_durable: set[str] = set()

    def make_folder(self, step: int, call: int) -> Attempt:
        attempt = Attempt(step=step, id=f"{len(self.calls) + 1:032x}")
        self.calls[attempt.id] = call
        self._files[attempt.id] = set()
        return attempt

    def write(self, attempt: Attempt, rank: int) -> bool:
        """False when the folder is gone."""
        if attempt.id not in self._files:
            return False
        self._files[attempt.id].add(rank)
        return True

    def publish(self, attempt: Attempt) -> bool:
        """False when the step is there already."""
        if attempt.step in self.manifests:
            return False
        missing = sorted(set(range(self._ranks_count)) - self._files.get(attempt.id, set()))
        if missing:
            raise Violation(f"a manifest was published without the files of ranks {missing}")
        self.manifests[attempt.step] = attempt.id
        return True

    def has_manifest(self, attempt: Attempt) -> bool:
        return self.manifests.get(attempt.step) == attempt.id

    def make_durable(self, attempt: Attempt) -> None:
        self._is_durable.add(attempt.id)

    def vanish(self, attempt: Attempt) -> None:
        """Whoever renamed the manifest died before it was durable."""
        if self.has_manifest(attempt) and attempt.id not in self._is_durable:
            del self.manifests[attempt.step]

    def abandon(self, attempt: Attempt) -> None:
        if self.has_manifest(attempt):
            raise Violation("the data of a published manifest was removed")
        self._files.pop(attempt.id, None)
