"""The saves that are killed and disturbed: what stands in the directory before, how the Saver is made, how it saves.

A delta needs a checkpoint of the same Saver to build upon, so some scenarios begin with a `base`, made by the same
process; only what comes after it is killed and disturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from op_log import DiskOp, begin_of_disturbed
from sample_state import SampleState
from shim import NOTHING, DiskFault, Shim

from asyncckpt import DeltaPolicy, DeviceOptions, Saver, SaveResult
from asyncckpt.filters import WriteBlock
from asyncckpt.native import DrainOptions
from asyncckpt.options import SaveOptions
from asyncckpt.pipeline.filters import identity
from asyncckpt.plan import deferred_tables, image
from asyncckpt.shard import files
from asyncckpt.staging import chunks
from asyncckpt.storage import directory

CHECKPOINT = "checkpoint"  # Its parent is watched too, for making the directory is part of the first save.
NEW_STEP = 5  # The step whose save is disturbed.
AFTER_STEP = 6  # The step that is saved afterwards.
FAR_STEPS = 1000  # A state that many steps on shares no row with this one.
FILE_BYTES = 6 << 10
WRITE_BYTES = 4 << 10
RESULT_SECONDS_MAX = 60.0


# Nearly all of these small files is headers, so a share of bytes would say nothing.
POLICY = DeltaPolicy(bytes_share_max=1e9)

Act = Literal["full", "delta", "compact"]


@dataclass(frozen=True)
class Scenario:
    """One kind of save. `before` are steps that are committed already, by another process; `base` is what the same
    process does first; `leftovers`: a killed save lies there too; `linked`: the system has no renameat2; `deferred`:
    multi-level tables are exported behind the fence."""

    name: str
    act: Act = "full"
    base: tuple[tuple[Act, int], ...] = ()
    staged: bool = True
    filtered: bool = False
    from_commit: bool = False
    keep: int | None = None
    before: tuple[int, ...] = (1,)
    leftovers: bool = False
    linked: bool = False
    deferred: bool = False

    @property
    def standing(self) -> set[int]:
        """The steps that are there when what is disturbed begins."""
        return {*self.before, *(step for _, step in self.base)}

    def begin_of_disturbed(self, log: Sequence[DiskOp]) -> int:
        """The log line with which what is disturbed begins."""
        return begin_of_disturbed(log, base_count=len(self.base), from_commit=self.from_commit)

    @property
    def has_deltas(self) -> bool:
        return bool(self.base)

    def open(self, root: Path, state: SampleState) -> Saver:
        if self.linked:
            without_renameat2: Any = SimpleNamespace()
            directory._libc = without_renameat2
        return Saver(
            path=root,
            hashtables=state.with_levels() if self.deferred else state.tables,
            tensors=state.tensors,
            device=DeviceOptions(host_level="first_touch"),
            filter_func=rewrite_all if self.filtered else identity,
            keep=self.keep,
            deltas=POLICY if self.has_deltas else None,
        )

    def open_watched(
        self,
        folder: Path,
        state: SampleState,
        fault: DiskFault = NOTHING,
        *,
        log: int = -1,
        tell: Callable[[int], object] = lambda step: None,
    ) -> Saver:
        """Watch the folder, make the Saver and what comes first; tells every step that is acknowledged.

        Operations count from 0 behind what comes first: there retention may find the end of its save or not, and looks
        at more or less. The fault is for what follows; for all of it where nothing comes first.
        """
        Shim().arm(folder, NOTHING if self.base else fault, log=log)
        saver = self.open(folder / CHECKPOINT, state)
        for step in self._make_base(saver, state):
            tell(step)
        if self.base:
            saver.wait_idle(RESULT_SECONDS_MAX)
            Shim().arm(folder, fault, log=log)
        return saver

    def _make_base(self, saver: Saver, state: SampleState) -> Iterator[int]:
        for act, step in self.base:
            result = saver.compact(step).result(RESULT_SECONDS_MAX) if act == "compact" else None
            if result is None:
                result = self.save(saver, state, step, full=act == "full")
                assert result.kind == act
            yield step

    def disturbed(self, saver: Saver, state: SampleState) -> SaveResult:
        """Do what is killed and disturbed: a save of NEW_STEP, or its compaction."""
        if self.act == "compact":
            return saver.compact(NEW_STEP).result(RESULT_SECONDS_MAX)
        result = self.save(saver, state, NEW_STEP, full=self.act == "full")
        assert result.kind == self.act
        return result

    def save(self, saver: Saver, state: SampleState, step: int, *, full: bool = False) -> SaveResult:
        """Bring the state to `step` and save it; while an async save is in flight the state goes on to another step.

        Where there are deltas the save is one, if its Saver has something to build it upon, unless it shall be full.
        """
        state.fill(step)
        kind: Any = "full" if full else "auto"
        if not self.staged:
            result = saver.save(step, kind=kind)
            saver.wait_idle(RESULT_SECONDS_MAX)
            return result
        future = saver.save_async(step, kind=kind)
        # The next step, so that most rows stay what they are; or one that shares no row.
        state.fill(step + 1 if self.has_deltas else step + FAR_STEPS)
        result = future.result(RESULT_SECONDS_MAX)
        saver.wait_idle(RESULT_SECONDS_MAX)  # Also for retention, so that all runs have the same order of operations.
        return result


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("async"),
        Scenario("blocking", staged=False),
        Scenario("filtered", filtered=True),
        Scenario("retention", keep=1, before=(0, 1)),
        Scenario("first", before=()),
        Scenario("after-crash", leftovers=True),
        Scenario("linked", linked=True),
        Scenario("left-open", deferred=True),
        Scenario("delta", "delta", base=(("full", 3), ("delta", 4))),
        # Retention takes a whole chain, and leaves one.
        Scenario(
            "retention-chain",
            "delta",
            base=(("full", 2), ("delta", 3), ("full", 4)),
            from_commit=True,
            keep=2,
            before=(),
        ),
        Scenario("compaction", "compact", base=(("full", 3), ("delta", 4), ("delta", 5)), before=()),
        # A compacted checkpoint stands for the end of the chain that stays; what it was made of goes.
        Scenario(
            "retention-compacted",
            "delta",
            base=(("full", 3), ("delta", 4), ("compact", 4)),
            from_commit=True,
            keep=1,
            before=(),
        ),
    )
}


def rewrite_all(blocks: list[WriteBlock]) -> Sequence[WriteBlock]:
    """A filter that changes no value, but makes the save write a new image: other order, copied data."""
    return [block.replace(data=block.data.clone()) if block.table is None else block for block in reversed(blocks)]


def make_saves_small() -> None:
    """Let the small sample state make several shard files of several writes each, as a large one would."""
    usual = files.drain_options

    def in_small_writes(options: SaveOptions, files_count: int) -> DrainOptions:
        return replace(usual(options, files_count), block_bytes=WRITE_BYTES)

    for module, name, small in (
        (image, "FILE_TARGET_BYTES", FILE_BYTES),
        (chunks, "CHUNK_BYTES", WRITE_BYTES),
        (deferred_tables, "CHUNK_BYTES", WRITE_BYTES),
        (files, "drain_options", in_small_writes),
    ):
        assert hasattr(module, name)
        setattr(module, name, small)
