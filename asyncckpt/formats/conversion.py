"""What the command line asks of every format: what a conversion would do, or to do it, as plain facts.

A format has a module with the four functions of Converter. Facts are `step`, `source`, `target`, `bytes`, `tensors`
(how many), and where a format has such: `values` (how many plain ones), `tables` (rows by name), `shards` (how many),
`seconds` of what was done; `reused`, bytes that an earlier try had
written; `left_out` and `left_out_tables` name what has no place in the target.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import xxhash

from asyncckpt.arguments import check_choice, check_int, check_type
from asyncckpt.commit.chain import read_chain
from asyncckpt.commit.discover import look_again, newest_step
from asyncckpt.commit.root import open_root
from asyncckpt.errors import must_be, warn
from asyncckpt.format.manifest import Chain
from asyncckpt.format.names import check_step
from asyncckpt.model.store_url import Place
from asyncckpt.native import Progress
from asyncckpt.options import DURABILITIES, PARALLEL_MAX, Durability, SaveOptions
from asyncckpt.plan.rename import Names
from asyncckpt.storage.directory import check_path
from asyncckpt.storage.folder import check_place
from asyncckpt.version import __version__

Facts = dict[str, Any]


@dataclass(frozen=True)
class Conversion:
    """From where to where, which step (None: the newest, for an import the next), how, and under which names. only: the
    name that everything is under that an export writes, without this; "": it writes all of the checkpoint.

    The one that is a checkpoint directory of ours may be in an object store.
    """

    source: Place
    target: Place
    step: int | None
    options: SaveOptions
    verify: bool
    progress: Progress
    names: Names = field(default_factory=Names)
    only: str = ""

    @staticmethod
    def of(
        source: str | os.PathLike[str],
        target: str | os.PathLike[str],
        step: int | None = None,
        *,
        parallel: int | None = None,
        durability: Durability = "fsync",
        verify: bool = True,
        progress: Progress | None = None,
        rename: Mapping[str, str] | None = None,
        only: str | None = None,
    ) -> Conversion:
        """Check what was given. UsageError."""
        check_choice("durability", durability, DURABILITIES)
        check_int("parallel", parallel, at_least=1, at_most=PARALLEL_MAX, optional=True)
        check_type("verify", verify, bool)
        if only == "":
            raise must_be("only", "the name of something in the checkpoint", only)
        options = SaveOptions(durability=durability)
        options = options if parallel is None else replace(options, parallel=parallel)
        places = check_place(source), check_place(target), check_step(step)
        return Conversion(*places, options, verify, progress or Progress(), Names.of(rename), only or "")

    @property
    def foreign(self) -> Path:
        """The source of an import, which is of another library, and so on a disk. UsageError for a URL."""
        return check_path(str(self.source))

    @property
    def exported(self) -> Path:
        """The target of an export, which is of another library, and so on a disk. UsageError for a URL."""
        return check_path(str(self.target))

    def part_of(self, chain: Chain) -> Chain:
        """Return what of a checkpoint is exported, under its new names."""
        return replace(self.names.chain(chain), inside=self.only)

    def expect(self, bytes: int) -> None:
        """Say how many bytes are going to be written; as many are read back."""
        self.progress.bytes_expected = bytes * (2 if self.verify else 1)

    def identity(self, source: object, options: object = None) -> str:
        """Return what two conversions have in common that write the same bytes. source: what its contents depend on."""
        what = [__version__, self.target.name, sorted(self.names.new.items()), self.options.parallel, source, options]
        return xxhash.xxh3_128_hexdigest(json.dumps(what).encode())

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

    tensors       names of the dense tensors
    rows          of the tables, by name
    left_out      names of plain values that the format has no place for; left_out_tensors, left_out_columns
                  (`table@column`) and tables: likewise
    shards_count  of tables; None: the format has none
    reused_bytes  of bytes_written: what an export that was killed had written already
    """

    step: int
    path: Path
    tensors: tuple[str, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    left_out_tensors: tuple[str, ...] = ()
    left_out_columns: tuple[str, ...] = ()
    shards_count: int | None = None
    files_count: int = 1
    values_count: int = 0
    bytes_written: int = 0
    reused_bytes: int = 0
    seconds: float = 0.0

    def facts(self) -> Facts:
        return {
            "step": self.step,
            **({"tables": dict(self.rows)} if self.rows else {}),
            "tensors": len(self.tensors),
            "bytes": self.bytes_written,
            "reused": self.reused_bytes,
            "left_out": list(self.left_out),
            "left_out_tables": list(self.tables),
            "left_out_tensors": list(self.left_out_tensors),
            "left_out_columns": list(self.left_out_columns),
        }


def warn_of_left_out(what: str, names: Sequence[str], library: str) -> None:
    """Warn of tables or tensors that an export has left out."""
    if names:
        warn(f"{what} {list(names)} are left out: {library} has none", RuntimeWarning)


def chain_to_export(path: Place, step: int | None) -> Chain:
    """Return a checkpoint (default: the newest) by its manifests alone. NotFoundError, CorruptError."""
    with open_root(path) as root:
        return look_again(root, lambda: read_chain(root, newest_step(root) if step is None else step))
