"""What the command line asks of safetensors files of Hugging Face (formats/conversion.py)."""

from __future__ import annotations

from pathlib import Path

from asyncckpt.commit.new_entry import check_is_free
from asyncckpt.formats.commit_import import check_step_is_free
from asyncckpt.formats.conversion import Facts, chain_to_export
from asyncckpt.formats.hf.directory import HfFiles
from asyncckpt.formats.hf.export_checkpoint import SHARD_BYTES, ExportPlan, run_export
from asyncckpt.formats.hf.import_checkpoint import run_import
from asyncckpt.native import Progress
from asyncckpt.options import SaveOptions
from asyncckpt.storage.directory import check_path


def look_into(source: Path, target: Path, step: int | None, *, parallel: int = 8) -> Facts:
    SaveOptions(parallel=parallel)
    path, out = check_path(source), check_path(target)
    with HfFiles.open(path) as found:
        check_step_is_free(out, step)
        return {
            "step": step,
            "source": str(path),
            "target": str(out),
            "tensors": len(found.arrays),
            "shards": len(found.files.names),
            "bytes": found.bytes,
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


def plan_export(source: Path, target: Path, step: int | None, *, shard_size: int = SHARD_BYTES) -> Facts:
    path, out = check_path(source), check_path(target)
    check_is_free(out)
    plan = ExportPlan.of(chain_to_export(path, step), shard_size=shard_size)
    return {**plan.report(out).facts(path), "shards": len(plan.files)}


def export_with(
    source: Path,
    target: Path,
    step: int | None,
    *,
    verify: bool,
    progress: Progress,
    shard_size: int = SHARD_BYTES,
) -> Facts:
    path, out = check_path(source), check_path(target)
    report = run_export(path, out, step, SaveOptions(), progress, verify=verify, shard_size=shard_size)
    return {**report.facts(path), "shards": report.files_count, "seconds": report.seconds}
