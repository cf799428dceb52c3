"""Export a checkpoint of ours as one file that torch.load reads with `weights_only`.

1. Load the state into tensors whose memory is a file without a name on the disk of the target (staging/file_memory.py):
   torch.save needs all tensors at once, and they may be more than memory holds.
2. torch.save writes beside the target; the file is synced.
3. With `verify`, torch.load maps it, and every tensor and value is compared.
4. It gets its name.
"""

from __future__ import annotations

import io
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncckpt import system
from asyncckpt.commit.discover import look_again, newest_step
from asyncckpt.commit.new_entry import NewEntry
from asyncckpt.commit.root import open_root
from asyncckpt.engine.load.run_load import LoadRequest, load_open, open_step
from asyncckpt.engine.load.whole_state import WholeRequest
from asyncckpt.engine.process.future import as_checkpoint_error
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.errors import CorruptError, UnsupportedError, UsageError
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.manifest import Chain
from asyncckpt.format.tree import kinds_in, path_name
from asyncckpt.format.values import TYPED_MAPPINGS
from asyncckpt.format.weights_only import why_refused
from asyncckpt.formats.conversion import Conversion, ExportReport, warn_of_left_out
from asyncckpt.formats.run_export import plan_export
from asyncckpt.formats.torch_file.archive import read_archive
from asyncckpt.model.enough_memory import enough_memory
from asyncckpt.native import Progress
from asyncckpt.options import BusyPolicy, Durability
from asyncckpt.plan.contents import Contents, contents_of
from asyncckpt.plan.layouts import check_without, kind_of, parts_of
from asyncckpt.shard.reader import READ_THREADS
from asyncckpt.signals import uninterrupted
from asyncckpt.staging.file_memory import FileMemory
from asyncckpt.storage.directory import io_failed


@dataclass(frozen=True)
class ExportPlan:
    """What to export, checked."""

    step: int
    contents: Contents

    @staticmethod
    def of(chain: Chain) -> ExportPlan:
        """Check everything. UnsupportedError for what torch.load would not give back, CorruptError."""
        contents = contents_of(chain)
        check_without(contents.tree, "an exported file", kinds=("nested",))
        for name, dtype in contents.unreadable.items():
            dtype_by_name(dtype, owner=name)
        if not (contents.dense or contents.values):
            raise UnsupportedError(f"step {chain.step} holds nothing but tables", hint="there is nothing to export")
        dtypes = {dense.dtype: name for name, dense in contents.dense.items()}
        for dtype, name in dtypes.items():
            _check_readable(
                torch.empty(0, dtype=dtype_by_name(dtype, owner=name).dtype, device="cpu"), f"tensor {name!r}"
            )
        if not TYPED_MAPPINGS.isdisjoint(kinds_in(contents.tree)):
            _check_readable(Counter(), "a Counter")
        try:
            _check_readable(list(contents.values.values()), "the values")
        except UnsupportedError:
            for path, value in contents.values.items():
                _check_readable(value, f"value {path_name(path)!r}")
            raise
        return ExportPlan(chain.step, contents)

    def report(self, path: Path) -> ExportReport:
        found = self.contents
        sizes = {
            dense.blocks: math.prod(dense.shape) * dtype_by_name(dense.dtype, owner=name).itemsize
            for name, dense in found.dense.items()
        }
        return ExportReport(
            self.step,
            path,
            tuple(found.dense),
            tables=tuple(found.tables),
            values_count=len(found.values),
            bytes_written=sum(sizes.values()),
        )


def export_checkpoint(
    path: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    step: int | None = None,
    durability: Durability = "fsync",
    verify: bool = True,
) -> ExportReport:
    """Write a checkpoint (default: the newest) as one file of torch.save; it is there all at once, or not.

    file    is made, with folders above it; ConflictError when there is something under this name
    verify  read all of it once more before it gets its name, and compare

    `torch.load(file, weights_only=True)` gives the dict that `asyncckpt.load` does, except NumPy arrays, which become
    tensors, NumPy scalars, which become numbers, and defaultdicts, which become dicts. Tables are left out, with a
    RuntimeWarning: a file has none. Nothing is under the name when an error is raised: NotFoundError, CorruptError,
    UnsupportedError for a dtype or value that torch would not give back, UsageError, IOFailedError; but
    IndeterminateError says that it is there, and perhaps not durable. Waits while a save or load of this process is in
    flight. Tensors take room on the disk once more, until it has ended, and no memory; those that overlap without being
    equal do.
    """
    report = export(Conversion.of(path, file, step, durability=durability, verify=verify))
    warn_of_left_out("tables", report.tables, "a file of torch.save")
    return report


@uninterrupted
def export(asked: Conversion) -> ExportReport:
    """Do the same, as it is asked for. Warns of nothing."""
    begun = time.perf_counter()
    plan_export(asked, ExportPlan.of)  # What is refused makes no folders.
    file, durability, progress = asked.exported, asked.options.durability, asked.progress
    with NewEntry(file, kind="torch", durability=durability) as entry, FileMemory(entry.scratch_file()) as memory:
        with enough_memory(f"an export of {str(asked.source)!r}"):
            plan, state = _load(asked, memory)
        try:
            size = _write(entry, state, durability)
            progress.advance(size)
            if asked.verify:
                _compare(read_archive(entry.temporary), state, file, progress)
        except (OSError, MemoryError) as error:
            raise as_checkpoint_error(error, plan.step) from error
        entry.give_name(file.is_file)
    return replace(plan.report(file), bytes_written=size, seconds=time.perf_counter() - begun)


def check_names(asked: Conversion) -> None:
    """Raise UsageError for new names in a part: these are given when all is loaded."""
    if asked.only and asked.names.new:
        raise UsageError("a file of torch.save is written of a part, or under new names", hint="leave out one of both")


def _load(asked: Conversion, memory: FileMemory) -> tuple[ExportPlan, Any]:
    """Load what is to be written; refuse it, if it cannot be, before a byte of data is read."""
    path, step = asked.source, asked.step
    check_names(asked)
    request = LoadRequest(threads=READ_THREADS, whole=WholeRequest(empty=memory.empty, inside=asked.only))
    with (
        save_lock.held("load", path, step, busy=BusyPolicy("wait")),
        open_root(path) as root,
    ):
        opened = look_again(root, lambda: open_step(root, request, newest_step(root) if step is None else step))
        with opened.reader:
            plan = ExportPlan.of(asked.part_of(opened.chain))
            size = plan.report(asked.exported).bytes_written
            asked.progress.bytes_expected = size * (3 if asked.verify else 2)  # It is read from here, too.
            tree = load_open(root, request, opened).tree
            asked.progress.advance(opened.reader.bytes_read)
    return plan, asked.names.state(_plain(tree, {}))


def _write(entry: NewEntry, state: Any, durability: Durability) -> int:
    """Write the file and sync it; return its bytes."""
    try:
        with os.fdopen(entry.make_file(), "wb") as out:
            torch.save(state, out)
            out.flush()
            if durability == "fsync":
                system.fsync(out.fileno())
            system.forget_pages(out.fileno())
            return out.tell()
    except OSError as error:
        raise io_failed(f"file {str(entry.temporary)!r} cannot be written", error) from error
    except RuntimeError as error:  # torch ends its archive also behind a write that has failed.
        if isinstance(error.__context__, OSError):
            raise io_failed(f"file {str(entry.temporary)!r} cannot be written", error.__context__) from error
        raise


def _plain(value: Any, dtypes: dict[int, torch.dtype]) -> Any:
    """Return a state without NumPy and defaultdicts, which torch.load refuses; and without views of one memory as other
    dtypes, which torch.save does: these get memory of their own. dtypes: of memory that was seen, by its address."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor) and not kind_of(value):
        is_view = dtypes.setdefault(value.untyped_storage().data_ptr(), value.dtype) != value.dtype
        return value.clone() if is_view and value.numel() else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, defaultdict):
        value = dict(value)
    if isinstance(value, dict):
        for key in value:
            value[key] = _plain(value[key], dtypes)
        return value
    if type(value) in (list, tuple):
        return type(value)(_plain(item, dtypes) for item in value)
    return value


def _check_readable(value: Any, what: str) -> None:
    """Raise UnsupportedError for what torch.save cannot write, or torch.load would not read with weights_only."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except Exception as error:
        reason = why_refused(error)
        raise UnsupportedError(f"{what} cannot be in a file that torch.load reads: {reason}") from error


def _compare(found: Any, state: Any, path: Path, progress: Progress, where: str = "") -> None:
    """Compare what was read back with what was written. CorruptError."""
    is_same = type(found) is type(state)
    if is_same and isinstance(state, torch.Tensor) and (kind := kind_of(state)):
        if is_same := kind == kind_of(found):
            _compare(parts_of(found, kind), parts_of(state, kind), path, progress, where)
    elif is_same and isinstance(state, torch.Tensor):
        is_same = found.dtype is state.dtype and found.shape == state.shape and _same_bits(found, state)
        progress.advance(state.nbytes)
    elif is_same and isinstance(state, Mapping):
        is_same = list(map(repr, found)) == list(map(repr, state))
        for key in state if is_same else ():
            _compare(found[key], state[key], path, progress, f"{where}.{key}")
    elif is_same and type(state) in (list, tuple):
        is_same = len(found) == len(state)
        for index in range(len(state)) if is_same else ():
            _compare(found[index], state[index], path, progress, f"{where}.{index}")
    elif is_same:
        is_same = found == state or repr(found) == repr(state)
    if not is_same:
        what = f"{where[1:]!r} of {str(path)!r} was not read back as it was written"
        raise CorruptError(what, hint="nothing was published; look at the disk")


def _same_bits(found: torch.Tensor, state: torch.Tensor) -> bool:
    if not found.numel():
        return True
    if not (found.is_contiguous() and state.is_contiguous()):
        found, state = found.contiguous(), state.contiguous()
    return torch.equal(found.view(-1).view(torch.uint8), state.view(-1).view(torch.uint8))
