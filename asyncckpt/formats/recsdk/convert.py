"""What the command line asks of RecSDK's format (formats/conversion.py)."""

from __future__ import annotations

import os
from collections.abc import Mapping

from asyncckpt.commit.new_entry import check_is_free
from asyncckpt.formats.commit_import import check_is_apart, check_step_is_free
from asyncckpt.formats.conversion import Conversion, Facts, chain_to_export, facts_of
from asyncckpt.formats.recsdk.export_checkpoint import ExportPlan, ExportReport, run_export
from asyncckpt.formats.recsdk.import_checkpoint import import_chain, run_import
from asyncckpt.formats.recsdk.open_files import OpenRecsdk

Columns = Mapping[str, str]


def look_into(asked: Conversion, *, columns: Columns | None = None) -> Facts:
    check_is_apart(asked.source, asked.target)
    with OpenRecsdk.open(asked.source) as opened:
        import_chain(opened, columns, os.open(os.devnull, os.O_WRONLY))
        check_step_is_free(asked.target, asked.step)
        return asked.facts(
            tables={name: sum(len(part.stored.ids) for part in parts) for name, parts in opened.tables.items()},
            tensors=0,
            shards=max(map(len, opened.tables.values())),
            bytes=opened.bytes,
        )


def import_with(asked: Conversion, *, columns: Columns | None = None) -> Facts:
    facts = look_into(asked, columns=columns)
    places = asked.source, asked.target, asked.step
    return {**facts, **facts_of(run_import(*places, columns, asked.options, asked.progress, verify=asked.verify))}


def plan_export(asked: Conversion, *, shards: int | None = None, columns: Columns | None = None) -> Facts:
    """tables: of deltas, rows before they are folded."""
    check_is_free(asked.target)
    plan = ExportPlan.of(chain_to_export(asked.source, asked.step), shards=shards, columns=columns)
    return {**_facts(asked, plan.report(asked.target)), "bytes": plan.bytes}


def export_with(asked: Conversion, *, shards: int | None = None, columns: Columns | None = None) -> Facts:
    places = asked.source, asked.target, asked.step
    report = run_export(*places, asked.options, asked.progress, verify=asked.verify, shards=shards, columns=columns)
    return {**_facts(asked, report), "bytes": report.bytes_written, "seconds": report.seconds}


def _facts(asked: Conversion, report: ExportReport) -> Facts:
    return asked.facts(
        step=report.step,
        tables=dict(report.rows),
        tensors=0,
        shards=report.shards_count or 1,
        left_out=list(report.left_out),
    )
