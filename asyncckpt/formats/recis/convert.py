"""What the command line asks of RecIS' format (formats/conversion.py)."""

from __future__ import annotations

from typing import Any

from asyncckpt.commit.new_entry import check_is_free
from asyncckpt.formats.commit_import import check_is_apart, check_step_is_free
from asyncckpt.formats.conversion import Conversion, Facts, chain_to_export, facts_of
from asyncckpt.formats.recis.directory import RecisDirectory
from asyncckpt.formats.recis.export_checkpoint import ExportPlan, ExportReport, run_export
from asyncckpt.formats.recis.import_checkpoint import import_chain, run_import, wanted_step
from asyncckpt.formats.recis.stored import Columns


def look_into(asked: Conversion, *, columns: Columns | None = None) -> Facts:
    check_is_apart(asked.source, asked.target)
    with RecisDirectory.open(asked.source) as found:
        import_chain(found, columns)
        step = wanted_step(asked.source, asked.step)
        check_step_is_free(asked.target, step)
        return asked.facts(
            step=step,
            tables={name: sum(part.rows_count for part in parts) for name, parts in found.tables.items()},
            tensors=len(found.dense),
            shards=max((len(parts) for parts in found.tables.values()), default=1),
            bytes=found.bytes,
        )


def import_with(asked: Conversion, *, columns: Columns | None = None) -> Facts:
    facts = look_into(asked, columns=columns)
    places = asked.source, asked.target, asked.step
    return {**facts, **facts_of(run_import(*places, columns, asked.options, asked.progress, verify=asked.verify))}


def plan_export(
    asked: Conversion, *, shards: int | None = None, columns: Columns | None = None, optimizer: str | None = None
) -> Facts:
    """tables: of deltas, rows before they are folded."""
    check_is_free(asked.target)
    chain = chain_to_export(asked.source, asked.step)
    plan = ExportPlan.of(chain, shards=shards, columns=columns, optimizer=optimizer)
    return {**_facts(asked, plan.report(asked.target)), "bytes": plan.bytes}


def export_with(
    asked: Conversion, *, shards: int | None = None, columns: Columns | None = None, optimizer: str | None = None
) -> Facts:
    places = asked.source, asked.target, asked.step
    names: dict[str, Any] = {"shards": shards, "columns": columns, "optimizer": optimizer}
    report = run_export(*places, asked.options, asked.progress, verify=asked.verify, **names)
    return {**_facts(asked, report), "bytes": report.bytes_written, "seconds": report.seconds}


def _facts(asked: Conversion, report: ExportReport) -> Facts:
    return asked.facts(
        step=report.step,
        tables=dict(report.rows),
        tensors=len(report.tensors),
        shards=report.shards_count,
        left_out=list(report.left_out),
    )
