"""What the command line asks of DCP's format (formats/conversion.py)."""

from __future__ import annotations

from contextlib import closing

from asyncckpt.commit.import_source import check_is_apart, reading
from asyncckpt.commit.new_entry import check_is_free
from asyncckpt.dcp import convert
from asyncckpt.formats.commit_import import check_step_is_free
from asyncckpt.formats.conversion import Conversion, Facts


def look_into(asked: Conversion) -> Facts:
    check_is_apart(asked.foreign, asked.target)
    with reading(asked.foreign), closing(convert.OpenDcp(asked.foreign, asked.options, asked.names)) as found:
        check_step_is_free(asked.target, asked.step)
        return {**_facts(asked, found.facts()), "step": asked.step}


def import_with(asked: Conversion) -> Facts:
    done = convert.run_import(
        *(asked.foreign, asked.target, asked.step, asked.options, asked.progress, asked.names), verify=asked.verify
    )
    return {**_facts(asked, done), "seconds": done.seconds}


def plan_export(asked: Conversion) -> Facts:
    check_is_free(asked.exported)
    return _facts(asked, convert.plan_export(asked.source, asked.step, asked.names))


def export_with(asked: Conversion) -> Facts:
    places = asked.source, asked.exported, asked.step
    done = convert.run_export(*places, asked.progress, asked.names, verify=asked.verify)
    return {**_facts(asked, done), "seconds": done.seconds}


def _facts(asked: Conversion, found: convert.Converted) -> Facts:
    return asked.facts(
        step=found.step,
        tensors=len(found.tensors),
        values=len(found.values),
        shards=found.files_count,
        bytes=found.bytes,
        left_out_tables=list(found.tables),
    )
