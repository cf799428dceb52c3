"""What the command line asks of every format: what a conversion would do, or to do it, as plain facts.

A format has a module with the four functions of Converter. Facts are `step`, `source`, `target`, `bytes`, `tensors`
(how many), and where a format has such: `values` (how many plain ones), `tables` (rows by name), `shards` (how many),
`seconds` of what was done; `left_out` and `left_out_tables` name what has no place in the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from asyncckpt.commit.chain import read_chain
from asyncckpt.commit.discover import look_again, newest_step
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.errors import warn
from asyncckpt.format.manifest import Chain
from asyncckpt.model.result import SaveResult
from asyncckpt.native import Progress
from asyncckpt.options import SaveOptions
from asyncckpt.storage.directory import check_path

Facts = dict[str, Any]


@dataclass(frozen=True)
class Conversion:
    """From where to where, which step (None: the newest; of an import, the next), and how."""

    source: Path
    target: Path
    step: int | None
    options: SaveOptions
    verify: bool
    progress: Progress

    @staticmethod
    def of(
        source: Path,
        target: Path,
        step: int | None = None,
        *,
        parallel: int | None = None,
        verify: bool = True,
        progress: Progress | None = None,
    ) -> Conversion:
        """Check what was given. UsageError."""
        options = SaveOptions() if parallel is None else SaveOptions(parallel=parallel)
        return Conversion(check_path(source), check_path(target), step, options, verify, progress or Progress())

    def facts(self, **more: Any) -> Facts:
        """Return those that every conversion has, and more, which stand instead of them."""
        places = {"step": self.step, "source": str(self.source), "target": str(self.target)}
        return {**places, "left_out": [], **more}


class Converter(Protocol):
    """Each takes a Conversion and the options of the format. look_into and plan_export say what would be done, and
    raise what the conversion would before it reads data; they make nothing. import_with and export_with do it."""

    @property
    def look_into(self) -> Callable[..., Facts]: ...
    @property
    def import_with(self) -> Callable[..., Facts]: ...
    @property
    def plan_export(self) -> Callable[..., Facts]: ...
    @property
    def export_with(self) -> Callable[..., Facts]: ...


@dataclass(frozen=True)
class ExportReport:
    """What was exported, of which step.

    tensors   names of the dense tensors
    left_out  names of plain values, and tables those of tables, which the format has no place for
    """

    step: int
    path: Path
    tensors: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    files_count: int = 1
    values_count: int = 0
    bytes_written: int = 0
    seconds: float = 0.0

    def facts(self) -> Facts:
        return {
            "step": self.step,
            "tensors": len(self.tensors),
            "bytes": self.bytes_written,
            "left_out": list(self.left_out),
            "left_out_tables": list(self.tables),
        }


def facts_of(result: SaveResult) -> Facts:
    """Return what an import that is done says."""
    return {"step": result.step, "bytes": result.bytes_written, "seconds": result.seconds}


def warn_of_tables(tables: Sequence[str], library: str) -> None:
    """Warn of tables that an export has left out."""
    if tables:
        warn(f"tables {list(tables)} are left out: {library} has none", RuntimeWarning)


def chain_to_export(path: Path, step: int | None) -> Chain:
    """Return a checkpoint (default: the newest) by its manifests alone. NotFoundError, CorruptError."""
    with CheckpointRoot.for_reading(path) as root:
        return look_again(root, lambda: read_chain(root, newest_step(root) if step is None else step))
