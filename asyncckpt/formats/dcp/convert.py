"""What the command line asks of DCP's format (formats/conversion.py)."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from asyncckpt.commit.new_entry import check_is_free
from asyncckpt.dcp import convert
from asyncckpt.formats.commit_import import check_step_is_free
from asyncckpt.formats.conversion import Facts
from asyncckpt.native import Progress
from asyncckpt.options import SaveOptions
from asyncckpt.storage.directory import check_path


def look_into(source: Path, target: Path, step: int | None, *, parallel: int = 8) -> Facts:
    path, out = check_path(source), check_path(target)
    with closing(convert.OpenDcp(path, SaveOptions(parallel=parallel))) as found:
        check_step_is_free(out, step)
        return {**_facts(found.facts(), path, out), "step": step}


def import_with(
    source: Path, target: Path, step: int | None, *, verify: bool, progress: Progress, parallel: int = 8
) -> Facts:
    path, out = check_path(source), check_path(target)
    done = convert.run_import(path, out, step, SaveOptions(parallel=parallel), progress, verify=verify)
    return {**_facts(done, path, out), "seconds": done.seconds}


def plan_export(source: Path, target: Path, step: int | None) -> Facts:
    path, out = check_path(source), check_path(target)
    check_is_free(out)
    return _facts(convert.plan_export(path, step), path, out)


def export_with(source: Path, target: Path, step: int | None, *, verify: bool, progress: Progress) -> Facts:
    path, out = check_path(source), check_path(target)
    done = convert.run_export(path, out, step, progress, verify=verify)
    return {**_facts(done, path, out), "seconds": done.seconds}


def _facts(found: convert.Converted, source: Path, target: Path) -> Facts:
    return {
        "step": found.step,
        "source": str(source),
        "target": str(target),
        "tensors": len(found.tensors),
        "values": len(found.values),
        "shards": found.files_count,
        "bytes": found.bytes,
        "left_out": [],
        "left_out_tables": list(found.tables),
    }
