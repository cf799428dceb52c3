"""A format that is read and written block by block, as the command line asks for it (conversion.py)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from asyncckpt.commit.new_entry import noted_bytes
from asyncckpt.formats.commit_import import Importable, look_into, run_import
from asyncckpt.formats.conversion import Conversion, ExportReport, Facts
from asyncckpt.formats.run_export import plan_export


@dataclass(frozen=True)
class BlockFormat:
    """A Converter. opens: a source that is to be imported; plans: an export of a chain; exports: does it.

    kind: what the name of an export begins with until it is complete.

    Each takes the options of the format.
    """

    opens: Callable[..., AbstractContextManager[Importable]]
    plans: Callable[..., Any]
    exports: Callable[..., ExportReport]
    kind: str

    def look_into(self, asked: Conversion, **options: Any) -> Facts:
        return look_into(asked, self.opens(asked, **options))

    def import_with(self, asked: Conversion, **options: Any) -> Facts:
        return run_import(asked, self.opens(asked, **options))[1]

    def plan_export(self, asked: Conversion, **options: Any) -> Facts:
        plan, identity = plan_export(asked, partial(self.plans, **options))
        noted = noted_bytes(asked.exported, kind=self.kind, identity=identity)
        return _facts(asked, replace(plan.report(asked.exported), reused_bytes=noted))

    def export_with(self, asked: Conversion, **options: Any) -> Facts:
        report = self.exports(asked, **options)
        return {**_facts(asked, report), "seconds": report.seconds}


def _facts(asked: Conversion, report: ExportReport) -> Facts:
    return asked.facts(**report.facts(), shards=report.shards_count or report.files_count)
