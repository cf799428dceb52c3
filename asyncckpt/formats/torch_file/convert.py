"""What the command line asks of files of torch.save (formats/conversion.py)."""

from __future__ import annotations

from asyncckpt.commit.new_entry import check_is_free
from asyncckpt.formats.commit_import import check_step_is_free
from asyncckpt.formats.conversion import Conversion, ExportReport, Facts, chain_to_export, facts_of
from asyncckpt.formats.torch_file.export_checkpoint import ExportPlan, run_export
from asyncckpt.formats.torch_file.import_checkpoint import FoundState, run_import


def look_into(asked: Conversion) -> Facts:
    found = FoundState.of(asked.source)
    check_step_is_free(asked.target, asked.step)
    return asked.facts(
        tensors=len(found.flat.tensors),
        values=len(found.flat.values),
        bytes=sum(tensor.nbytes for tensor in found.flat.tensors),
        left_out_tables=[],
    )


def import_with(asked: Conversion) -> Facts:
    facts = look_into(asked)
    done = run_import(asked.source, asked.target, asked.step, asked.options, asked.progress, verify=asked.verify)
    return {**facts, **facts_of(done)}


def plan_export(asked: Conversion) -> Facts:
    check_is_free(asked.target)
    plan = ExportPlan.of(chain_to_export(asked.source, asked.step))
    return _facts(asked, plan.report(asked.target))


def export_with(asked: Conversion) -> Facts:
    durability = asked.options.durability
    report = run_export(asked.source, asked.target, asked.step, durability, asked.progress, verify=asked.verify)
    return {**_facts(asked, report), "seconds": report.seconds}


def _facts(asked: Conversion, report: ExportReport) -> Facts:
    return asked.facts(**report.facts(), values=report.values_count)
