"""What the command line asks of safetensors files of Hugging Face (formats/conversion.py)."""

from __future__ import annotations

from asyncckpt.commit.new_entry import check_is_free
from asyncckpt.formats.commit_import import check_step_is_free
from asyncckpt.formats.conversion import Conversion, Facts, chain_to_export, facts_of
from asyncckpt.formats.hf.directory import HfFiles
from asyncckpt.formats.hf.export_checkpoint import SHARD_BYTES, ExportPlan, run_export
from asyncckpt.formats.hf.import_checkpoint import run_import


def look_into(asked: Conversion) -> Facts:
    with HfFiles.open(asked.source) as found:
        check_step_is_free(asked.target, asked.step)
        return asked.facts(
            tensors=len(found.arrays), shards=len(found.files.names), bytes=found.bytes, left_out_tables=[]
        )


def import_with(asked: Conversion) -> Facts:
    facts = look_into(asked)
    done = run_import(asked.source, asked.target, asked.step, asked.options, asked.progress, verify=asked.verify)
    return {**facts, **facts_of(done)}


def plan_export(asked: Conversion, *, shard_size: int = SHARD_BYTES) -> Facts:
    check_is_free(asked.target)
    plan = ExportPlan.of(chain_to_export(asked.source, asked.step), shard_size=shard_size)
    return asked.facts(**plan.report(asked.target).facts(), shards=len(plan.files))


def export_with(asked: Conversion, *, shard_size: int = SHARD_BYTES) -> Facts:
    places = asked.source, asked.target, asked.step
    report = run_export(*places, asked.options, asked.progress, verify=asked.verify, shard_size=shard_size)
    return asked.facts(**report.facts(), shards=report.files_count, seconds=report.seconds)
