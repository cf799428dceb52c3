"""What the command line asks of files of torch.save (formats/conversion.py)."""

from __future__ import annotations

from pathlib import Path

from asyncckpt.commit.new_entry import check_is_free
from asyncckpt.formats.commit_import import check_step_is_free
from asyncckpt.formats.conversion import ExportReport, Facts, chain_to_export
from asyncckpt.formats.torch_file.export_checkpoint import ExportPlan, run_export
from asyncckpt.formats.torch_file.import_checkpoint import FoundState, run_import
from asyncckpt.native import Progress
from asyncckpt.options import SaveOptions
from asyncckpt.storage.directory import check_path


def look_into(source: Path, target: Path, step: int | None, *, parallel: int = 8) -> Facts:
    SaveOptions(parallel=parallel)
    path, out = check_path(source), check_path(target)
    found = FoundState.of(path)
    check_step_is_free(out, step)
    return {
        "step": step,
        "source": str(path),
        "target": str(out),
        "tensors": len(found.flat.tensors),
        "values": len(found.flat.values),
        "bytes": sum(tensor.nbytes for tensor in found.flat.tensors),
        "left_out": [],
        "left_out_tables": [],
    }


def import_with(
    source: Path, target: Path, step: int | None, *, verify: bool, progress: Progress, parallel: int = 8
) -> Facts:
    facts = look_into(source, target, step)
    options = SaveOptions(parallel=parallel)
    result = run_import(check_path(source), check_path(target), step, options, progress, verify=verify)
    return {**facts, "step": result.step, "bytes": result.bytes_written, "seconds": result.seconds}


def plan_export(source: Path, target: Path, step: int | None) -> Facts:
    path, out = check_path(source), check_path(target)
    check_is_free(out)
    plan = ExportPlan.of(chain_to_export(path, step))
    return _facts(plan.report(out), path)


def export_with(source: Path, target: Path, step: int | None, *, verify: bool, progress: Progress) -> Facts:
    path, out = check_path(source), check_path(target)
    report = run_export(path, out, step, "fsync", progress, verify=verify)
    return {**_facts(report, path), "seconds": report.seconds}


def _facts(report: ExportReport, source: Path) -> Facts:
    return {**report.facts(source), "values": report.values_count}
