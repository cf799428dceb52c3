"""The user's filter function on the blocks of one save, in the background."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from asyncckpt.engine.job import SaveJob
from asyncckpt.model.block import TableFacts
from asyncckpt.model.table import Role
from asyncckpt.model.write_block import WriteBlock
from asyncckpt.pipeline.filters import FilteredBlock, identity, run_filter
from asyncckpt.snapshot.capture import block_tensor, live_block


class Fetch:
    """The data of one block. From live memory it is copied, and the copy is what gets written."""

    def __init__(self, job: SaveJob, number: int) -> None:
        self._job = job
        self._number = number
        self.copied: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        job, number = self._job, self._number
        if job.staged is not None:
            return block_tensor(job.plan, number, job.staged.arena.view()[job.staged.base :])
        if self.copied is None:
            self.copied = live_block(job.plan, job.cut.flat, job.cut.tables, number)
        return self.copied


@dataclass(frozen=True)
class Filtered:
    """What the filter left of the plan (None: everything), and the copies it has looked at."""

    blocks: list[FilteredBlock] | None = None
    fetches: list[Fetch] = field(default_factory=list)


def filter_blocks(job: SaveJob) -> Filtered:
    """On a worker thread: run the user's function, if there is one."""
    function = job.target.filter_func
    if function is identity:
        return Filtered()
    fetches = [Fetch(job, number) for number in range(len(job.plan.image.blocks))]
    blocks = [WriteBlock(placed.spec, fetch) for placed, fetch in zip(job.plan.image.blocks, fetches, strict=True)]
    return Filtered(blocks=run_filter(function, blocks), fetches=fetches)


def is_elsewhere(job: SaveJob, number: int) -> bool:
    """Whether other ranks write this block of the plan."""
    spec = job.plan.image.blocks[number].spec
    return spec.leaf in job.elsewhere.leaves or spec.table in job.elsewhere.tables


def filtered_tables(job: SaveJob, blocks: list[FilteredBlock]) -> tuple[TableFacts, ...]:
    """The tables whose ids the filter left, under the names that it gave them."""
    shards = {item.name: item.shard for item in job.cut.tables}
    tables = {}
    for item in blocks:
        if item.spec.role is Role.ID and item.spec.table is not None:
            rows_count = (item.spec.whole_shape or item.spec.shape)[0]
            original = job.plan.image.blocks[item.number].spec.table
            shard = shards[str(original)]
            tables[item.spec.table] = TableFacts(name=item.spec.table, rows_count=rows_count, shard=shard)
    return tuple(tables.values())
