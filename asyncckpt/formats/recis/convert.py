"""What the command line asks for: conversions with their progress, or only what they would do, as plain facts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncckpt.commit.chain import read_chain
from asyncckpt.commit.claims import step_exists
from asyncckpt.commit.discover import is_committed, look_again, newest_step
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.errors import NotFoundError
from asyncckpt.formats.recis.directory import RecisDirectory
from asyncckpt.formats.recis.export_checkpoint import ExportPlan, run_export
from asyncckpt.formats.recis.import_checkpoint import import_chain, run_import, wanted_step
from asyncckpt.formats.recis.write_directory import check_is_free
from asyncckpt.native import Progress
from asyncckpt.options import SaveOptions
from asyncckpt.storage.directory import check_path

Facts = dict[str, Any]


def look_into(source: Path, target: Path, step: int | None, columns: Mapping[str, str]) -> Facts:
    """Return what an import would do; reads no rows, makes nothing. Raises what the import would find before it reads
    rows."""
    path = check_path(source)
    with RecisDirectory.open(path) as found:
        import_chain(found, columns)
        step = wanted_step(path, step)
        if step is not None:
            _check_step_is_free(check_path(target), step)
        return {
            "step": step,
            "source": str(path),
            "target": str(check_path(target)),
            "tables": {name: sum(part.rows_count for part in parts) for name, parts in found.tables.items()},
            "tensors": len(found.dense),
            "shards": max((len(parts) for parts in found.tables.values()), default=1),
            "bytes": found.bytes,
            "left_out": [],
        }


def import_with(
    source: Path,
    target: Path,
    step: int | None,
    columns: Mapping[str, str],
    *,
    parallel: int,
    verify: bool,
    progress: Progress,
) -> Facts:
    """Import, and return what was done."""
    facts = look_into(source, target, step, columns)
    options = SaveOptions(parallel=parallel)
    result = run_import(check_path(source), check_path(target), step, columns, options, progress, verify=verify)
    return {**facts, "step": result.step, "bytes": result.bytes_written, "seconds": result.seconds}


def plan_export(source: Path, target: Path, step: int | None, **names: Any) -> Facts:
    """Return what an export would do; reads the manifest alone. tables: of deltas, rows before they are folded."""
    path, out = check_path(source), check_path(target)
    check_is_free(out)
    with CheckpointRoot.for_reading(path) as root:
        chain = look_again(root, lambda: read_chain(root, newest_step(root) if step is None else step))
    plan = ExportPlan.of(chain, **names)
    return {**_facts(plan.report(out), path), "bytes": plan.bytes}


def export_with(
    source: Path, target: Path, step: int | None, *, parallel: int, verify: bool, progress: Progress, **names: Any
) -> Facts:
    """Export, and return what was done."""
    path, out = check_path(source), check_path(target)
    report = run_export(path, out, step, SaveOptions(parallel=parallel), progress, verify=verify, **names)
    return {**_facts(report, path), "bytes": report.bytes_written, "seconds": report.seconds}


def _facts(report: Any, source: Path) -> Facts:
    return {
        "step": report.step,
        "source": str(source),
        "target": str(report.path),
        "tables": dict(report.rows),
        "tensors": len(report.tensors),
        "shards": report.shards_count,
        "left_out": list(report.left_out),
    }


def _check_step_is_free(path: Path, step: int) -> None:
    try:
        with CheckpointRoot.for_reading(path) as root:
            if is_committed(root, step):
                raise step_exists(root, step)
    except NotFoundError:
        return
