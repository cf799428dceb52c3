"""What the command line asks of RecIS' format (formats/conversion.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncckpt.commit.new_entry import check_is_free
from asyncckpt.formats.commit_import import check_is_apart, check_step_is_free
from asyncckpt.formats.conversion import Facts, chain_to_export
from asyncckpt.formats.recis.directory import RecisDirectory
from asyncckpt.formats.recis.export_checkpoint import ExportPlan, ExportReport, run_export
from asyncckpt.formats.recis.import_checkpoint import import_chain, run_import, wanted_step
from asyncckpt.formats.recis.stored import Columns
from asyncckpt.native import Progress
from asyncckpt.options import SaveOptions
from asyncckpt.storage.directory import check_path


def look_into(
    source: Path, target: Path, step: int | None, *, columns: Columns | None = None, parallel: int = 8
) -> Facts:
    SaveOptions(parallel=parallel)
    path = check_path(source)
    check_is_apart(path, check_path(target))
    with RecisDirectory.open(path) as found:
        import_chain(found, columns)
        step = wanted_step(path, step)
        check_step_is_free(check_path(target), step)
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
    *,
    verify: bool,
    progress: Progress,
    columns: Columns | None = None,
    parallel: int = 8,
) -> Facts:
    facts = look_into(source, target, step, columns=columns)
    options = SaveOptions(parallel=parallel)
    result = run_import(check_path(source), check_path(target), step, columns, options, progress, verify=verify)
    return {**facts, "step": result.step, "bytes": result.bytes_written, "seconds": result.seconds}


def plan_export(
    source: Path,
    target: Path,
    step: int | None,
    *,
    shards: int | None = None,
    columns: Columns | None = None,
    optimizer: str | None = None,
    parallel: int = 8,
) -> Facts:
    """tables: of deltas, rows before they are folded."""
    path, out = check_path(source), check_path(target)
    check_is_free(out)
    plan = ExportPlan.of(chain_to_export(path, step), shards=shards, columns=columns, optimizer=optimizer)
    return {**_facts(plan.report(out), path), "bytes": plan.bytes}


def export_with(
    source: Path,
    target: Path,
    step: int | None,
    *,
    verify: bool,
    progress: Progress,
    shards: int | None = None,
    columns: Columns | None = None,
    optimizer: str | None = None,
    parallel: int = 8,
) -> Facts:
    path, out = check_path(source), check_path(target)
    names: dict[str, Any] = {"shards": shards, "columns": columns, "optimizer": optimizer}
    report = run_export(path, out, step, SaveOptions(parallel=parallel), progress, verify=verify, **names)
    return {**_facts(report, path), "bytes": report.bytes_written, "seconds": report.seconds}


def _facts(report: ExportReport, source: Path) -> Facts:
    return {
        "step": report.step,
        "source": str(source),
        "target": str(report.path),
        "tables": dict(report.rows),
        "tensors": len(report.tensors),
        "shards": report.shards_count,
        "left_out": list(report.left_out),
    }
