"""What the command line asks of files of torch.save (formats/conversion.py)."""

from __future__ import annotations

from asyncckpt.formats.commit_import import check_step_is_free
from asyncckpt.formats.conversion import Conversion, ExportReport, Facts
from asyncckpt.formats.run_export import plan_export as plan_export_of
from asyncckpt.formats.torch_file.export_checkpoint import ExportPlan, check_names, export
from asyncckpt.formats.torch_file.import_checkpoint import FoundState, run_import


def look_into(asked: Conversion) -> Facts:
    found = FoundState.of(asked.foreign, asked.names)
    check_step_is_free(asked.target, asked.step)
    return asked.facts(
        tensors=len(found.flat.tensors),
        values=len(found.flat.values),
        bytes=sum(tensor.nbytes for tensor in found.flat.tensors),
        left_out_tables=[],
    )


def import_with(asked: Conversion) -> Facts:
    facts = look_into(asked)
    done = run_import(asked)
    return {**facts, "step": done.step, "bytes": done.bytes_written, "seconds": done.seconds}


def plan_export(asked: Conversion) -> Facts:
    check_names(asked)
    return _facts(asked, plan_export_of(asked, ExportPlan.of)[0].report(asked.exported))


def export_with(asked: Conversion) -> Facts:
    report = export(asked)
    return {**_facts(asked, report), "seconds": report.seconds}


def _facts(asked: Conversion, report: ExportReport) -> Facts:
    return asked.facts(**report.facts(), values=report.values_count)
