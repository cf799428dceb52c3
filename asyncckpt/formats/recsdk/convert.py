"""What the command line asks of RecSDK's format (formats/conversion.py)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from asyncckpt.commit.new_entry import check_is_free
from asyncckpt.formats.commit_import import check_is_apart, check_step_is_free
from asyncckpt.formats.conversion import Facts, chain_to_export
from asyncckpt.formats.recsdk.export_checkpoint import ExportPlan, ExportReport, run_export
from asyncckpt.formats.recsdk.import_checkpoint import import_chain, run_import
from asyncckpt.formats.recsdk.open_files import OpenRecsdk
from asyncckpt.native import Progress
from asyncckpt.options import SaveOptions
from asyncckpt.storage.directory import check_path

Columns = Mapping[str, str]


def look_into(
    source: Path, target: Path, step: int | None, *, columns: Columns | None = None, parallel: int = 8
) -> Facts:
    SaveOptions(parallel=parallel)
    path = check_path(source)
    check_is_apart(path, check_path(target))
    with OpenRecsdk.open(path) as opened:
        import_chain(opened, columns, os.open(os.devnull, os.O_WRONLY))
        check_step_is_free(check_path(target), step)
        return {
            "step": step,
            "source": str(path),
            "target": str(check_path(target)),
            "tables": {name: sum(len(part.stored.ids) for part in parts) for name, parts in opened.tables.items()},
            "tensors": 0,
            "shards": max(map(len, opened.tables.values())),
            "bytes": opened.bytes,
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
    facts = look_into(source, target, step, columns=columns, parallel=parallel)
    options = SaveOptions(parallel=parallel)
    done = run_import(check_path(source), check_path(target), step, columns, options, progress, verify=verify)
    return {**facts, "step": done.step, "bytes": done.bytes_written, "seconds": done.seconds}


def plan_export(
    source: Path, target: Path, step: int | None, *, shards: int | None = None, columns: Columns | None = None
) -> Facts:
    """tables: of deltas, rows before they are folded."""
    path, out = check_path(source), check_path(target)
    check_is_free(out)
    plan = ExportPlan.of(chain_to_export(path, step), shards=shards, columns=columns)
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
) -> Facts:
    path, out = check_path(source), check_path(target)
    report = run_export(path, out, step, SaveOptions(), progress, verify=verify, shards=shards, columns=columns)
    return {**_facts(report, path), "bytes": report.bytes_written, "seconds": report.seconds}


def _facts(report: ExportReport, source: Path) -> Facts:
    return {
        "step": report.step,
        "source": str(source),
        "target": str(report.path),
        "tables": dict(report.rows),
        "tensors": 0,
        "shards": report.shards_count or 1,
        "left_out": list(report.left_out),
    }
