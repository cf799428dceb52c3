"""The results of saves and loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.model.store_url import Place


@dataclass(frozen=True)
class SaveResult:
    """The result of one save.

    stall_seconds   how long the caller waited in the call
    step_wait_seconds  how long steps of `optimizers=` waited for copies on the host, until the save was durable
    seconds         from the call until the checkpoint was durable (for a skipped save: until the call returned)
    bytes_logical   bytes of all tensors and table rows
    bytes_written   bytes of all files, including headers and manifest
    rows_count      rows of tables in the checkpoint itself (for a delta: those written since its parent)
    rows_copied     rows that were copied while training waited; the others were in the arena already
    missed_ids      in an audit: ids of rows that were changed without a mark, by table, at most 100 of each
    fallback        why the save was blocking, None if it was not
    skipped         whether the save was skipped because another one was in flight; nothing else is meaningful then
    waits_for       of ranks that save in turn: those whose parts have not come. Until they have, this part is written,
                    and there is no checkpoint
    """

    step: int
    kind: str
    path: Place
    skipped: bool = False
    fallback: str | None = None
    stall_seconds: float = 0.0
    step_wait_seconds: float = 0.0
    seconds: float = 0.0
    bytes_logical: int = 0
    bytes_written: int = 0
    rows_count: int = 0
    rows_copied: int = 0
    missed_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    waits_for: tuple[int, ...] = ()


@dataclass(frozen=True)
class SaverStatistics:
    """What a Saver did so far; sums are over committed saves."""

    saves_count: int = 0
    failed_count: int = 0
    cancelled_count: int = 0
    skipped_count: int = 0
    fallback_count: int = 0
    deltas_count: int = 0
    bytes_written: int = 0
    rows_count: int = 0
    rows_copied: int = 0
    stall_seconds: float = 0.0
    step_wait_seconds: float = 0.0
    plans_made_count: int = 0
    arenas_count: int = 0
    arena_bytes: int = 0
    arena_touches_count: int = 0


@dataclass(frozen=True)
class PruneReport:
    """What retention removes, and why the rest stays.

    removed  steps, ascending
    kept     of every other step, ascending, all that keeps it: rules of the KeepPolicy by their names, "pinned", "in
             use" by a save of this process or as the newest step that it has verified, "damaged"; else "base of N" for
             a step that the kept step N needs, "perhaps base of N" where the manifest of N cannot be read
    bytes    of the files that go, also of those that a compacted checkpoint stands for
    damaged  steps among these that are damaged, with what is wrong: no rule counts them, and all that may be their
             bases stays
    """

    removed: tuple[int, ...]
    kept: Mapping[int, tuple[str, ...]]
    bytes: int
    damaged: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GarbageReport:
    """What attempts and crashes had left, and was removed: attempts' folders, and files in them and in manifests/; and
    sessions of ranks.
    """

    folders_count: int
    files_count: int
    bytes: int
    sessions_count: int = 0


@dataclass(frozen=True)
class LoadReport:
    """The result of a load.

    step          the step that was loaded
    path          the checkpoint directory
    values        plain values of the state by dotted name, for example {"epoch": 3}; NumPy scalars, if they are
                  among the targets, too
    tree          the whole state as it was saved, of a Loader without targets and filter (see asyncckpt.load); else
                  None
    metadata      the user metadata given to the save
    loaded        destination -> sources that filled it, RecIS' form {destination: {source: [columns]}}
    missing       destinations of the model that the checkpoint lacks (strict=False only)
    unexpected    entries of the checkpoint that were not loaded
    fallback_from newer steps that were skipped because they were damaged (fallback=True only)
    rows          rows loaded per table
    is_empty      whether nothing of what was asked for was loaded; with strict=False, there is a warning, too
    """

    step: int
    path: Place
    values: Mapping[str, Any] = field(default_factory=dict)
    tree: dict[str, Any] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    loaded: Mapping[str, Mapping[str, list[str]]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    fallback_from: tuple[int, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)
    is_empty: bool = False
    bytes_read: int = 0
    seconds: float = 0.0

    def __repr__(self) -> str:
        """Say how much was loaded; all names are in the attributes."""
        counts = {name: len(getattr(self, name)) for name in ("loaded", "values", "missing", "unexpected")}
        shown = [f"step={self.step}", f"path={str(self.path)!r}"]
        shown += [f"{name}={count}" for name, count in counts.items() if count]
        if self.rows:
            shown.append(f"rows={sum(self.rows.values())} of {len(self.rows)} tables")
        if self.fallback_from:
            shown.append(f"fallback_from={list(self.fallback_from)}")
        if self.is_empty:
            shown.append("is_empty=True")
        return f"LoadReport({', '.join(shown)}, bytes_read={self.bytes_read}, seconds={self.seconds:.3f})"


@dataclass(frozen=True)
class VerifyReport:
    """A sound checkpoint: how much was read, and `strays`, leftovers of crashed saves beside it.

    steps: its chain, newest first; only its own step for a full checkpoint.
    """

    step: int
    steps: tuple[int, ...]
    path: Place
    blocks_count: int
    bytes_read: int
    strays: tuple[str, ...]
