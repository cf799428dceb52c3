"""The saves that are killed and disturbed: what stands in the directory before, how the Saver is made, how it saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sample_state import SampleState

from asyncckpt import Saver, SaveResult, WriteBlock
from asyncckpt.native import DrainOptions
from asyncckpt.options import SaveOptions
from asyncckpt.pipeline.filters import identity
from asyncckpt.plan import image, open_tables
from asyncckpt.shard import drain, stream
from asyncckpt.storage import directory

NEW_STEP = 5  # The step whose save is disturbed.
AFTER_STEP = 6  # The step that is saved afterwards.
FILE_BYTES = 6 << 10
WRITE_BYTES = 4 << 10
RESULT_SECONDS_MAX = 60.0


@dataclass(frozen=True)
class Scenario:
    """One kind of save. `before` are steps that are committed already; `leftovers`: a killed save lies there too;
    `linked`: the system has no renameat2; `left_open`: multi-level tables are exported behind the fence."""

    name: str
    staged: bool = True
    filtered: bool = False
    keep_latest: int | None = None
    before: tuple[int, ...] = (1,)
    leftovers: bool = False
    linked: bool = False
    left_open: bool = False

    def open(self, root: Path, state: SampleState) -> Saver:
        if self.linked:
            without_renameat2: Any = SimpleNamespace()
            directory._libc = without_renameat2
        return Saver(
            path=root,
            hashtables=state.with_levels() if self.left_open else state.tables,
            tensors=state.tensors,
            host_level="first_touch",
            filter_func=rewrite_all if self.filtered else identity,
            keep_latest=self.keep_latest,
        )

    def save(self, saver: Saver, state: SampleState, step: int) -> SaveResult:
        """Bring the state to `step` and save it; while an async save is in flight the state goes on to another step."""
        state.fill(step)
        if not self.staged:
            return saver.save(step)
        future = saver.save_async(step)
        state.fill(step + 1000)
        return future.result(RESULT_SECONDS_MAX)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("async"),
        Scenario("blocking", staged=False),
        Scenario("filtered", filtered=True),
        Scenario("retention", keep_latest=1, before=(0, 1)),
        Scenario("first", before=()),
        Scenario("after-crash", leftovers=True),
        Scenario("linked", linked=True),
        Scenario("left-open", left_open=True),
    )
}


def rewrite_all(blocks: list[WriteBlock]) -> Sequence[WriteBlock]:
    """A filter that changes no value, but makes the save write a new image: other order, copied data."""
    return [block.replace(data=block.data.clone()) if block.table is None else block for block in reversed(blocks)]


def make_saves_small() -> None:
    """Let the small sample state make several shard files of several writes each, as a large one would."""
    usual = drain.drain_options

    def in_small_writes(options: SaveOptions, files_count: int) -> DrainOptions:
        return replace(usual(options, files_count), block_bytes=WRITE_BYTES)

    for module, name, small in (
        (image, "FILE_TARGET_BYTES", FILE_BYTES),
        (stream, "CHUNK_BYTES", WRITE_BYTES),
        (open_tables, "CHUNK_BYTES", WRITE_BYTES),
        (drain, "drain_options", in_small_writes),
    ):
        assert hasattr(module, name)
        setattr(module, name, small)
