"""Export a checkpoint of ours: planned by its manifests alone, then read and written by whoever knows the format."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from asyncckpt.commit.chain import read_chain
from asyncckpt.commit.discover import look_again, newest_step
from asyncckpt.commit.new_entry import check_is_free
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.engine.process.future import as_checkpoint_error
from asyncckpt.format.manifest import Chain
from asyncckpt.formats.conversion import Conversion, chain_to_export
from asyncckpt.native import Progress
from asyncckpt.shard.reader import ChainReader
from asyncckpt.signals import uninterrupted

Plan = TypeVar("Plan")
Written = TypeVar("Written")


def plan_export(asked: Conversion, plan_of: Callable[[Chain], Plan]) -> Plan:
    """Return what would be exported. Raises what an export would before it reads data."""
    check_is_free(asked.target)
    return plan_of(asked.names.chain(chain_to_export(asked.source, asked.step)))


@uninterrupted
def run_export(
    asked: Conversion, plan_of: Callable[[Chain], Plan], write: Callable[[Plan, ChainReader], Written]
) -> tuple[Plan, Written, float]:
    """Plan and write; return the plan, what `write` returned, and the seconds it took."""
    begun = time.perf_counter()
    with CheckpointRoot.for_reading(asked.source) as root:

        def look() -> tuple[int, Plan, ChainReader]:
            chain = read_chain(root, newest_step(root) if asked.step is None else asked.step)
            plan = plan_of(asked.names.chain(chain))
            return chain.step, plan, ChainReader(root.data, chain, threads=1, verify=True, progress=Progress())

        check_is_free(asked.target)
        step, plan, reader = look_again(root, look)
        with reader:
            try:
                written = write(plan, reader)
            except (OSError, MemoryError) as error:
                raise as_checkpoint_error(error, step) from error
    return plan, written, time.perf_counter() - begun
