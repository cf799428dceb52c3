"""Export a checkpoint of ours: planned by its manifests alone, then read and written by whoever knows the format."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from asyncckpt.commit.chain import read_chain
from asyncckpt.commit.discover import look_again, newest_step
from asyncckpt.commit.new_entry import check_is_free
from asyncckpt.commit.root import open_root
from asyncckpt.engine.process.future import as_checkpoint_error
from asyncckpt.format.manifest import Chain
from asyncckpt.formats.conversion import Conversion, chain_to_export
from asyncckpt.model.enough_memory import enough_memory
from asyncckpt.native import Progress
from asyncckpt.shard.reader import ChainReader
from asyncckpt.signals import uninterrupted

Plan = TypeVar("Plan")
Written = TypeVar("Written")


def plan_export(asked: Conversion, plan_of: Callable[[Chain], Plan]) -> tuple[Plan, str]:
    """Return what would be exported, and its identity. Raises what an export would before it reads data."""
    check_is_free(asked.exported)
    chain = chain_to_export(asked.source, asked.step)
    return plan_of(asked.part_of(chain)), identity_of_export(asked, chain, plan_of)


def identity_of_export(asked: Conversion, chain: Chain, plan_of: Callable[[Chain], Plan]) -> str:
    """Return what two exports have in common that write the same bytes: manifests, and with them the digests of all
    data, names and options."""
    options = plan_of.keywords if isinstance(plan_of, partial) else {}
    digests = [manifest.digest for manifest in chain.manifests]
    return asked.identity(digests, repr((asked.only, sorted(options.items()))))


@uninterrupted
def run_export(
    asked: Conversion, plan_of: Callable[[Chain], Plan], write: Callable[[Plan, ChainReader, str], Written]
) -> tuple[Plan, Written, float]:
    """Plan and write; return the plan, what `write` returned, and the seconds it took.

    write: gets the identity too, with which an export that was killed is gone on with.
    """
    begun = time.perf_counter()
    with open_root(asked.source) as root:

        def look() -> tuple[int, Plan, ChainReader, str]:
            chain = read_chain(root, newest_step(root) if asked.step is None else asked.step)
            plan = plan_of(asked.part_of(chain))
            reader = ChainReader(root.data, chain, threads=1, verify=True, progress=Progress())
            return chain.step, plan, reader, identity_of_export(asked, chain, plan_of)

        check_is_free(asked.exported)
        step, plan, reader, identity = look_again(root, look)
        with reader:
            try:
                with enough_memory(f"an export of step {step} of {str(asked.source)!r}"):
                    written = write(plan, reader, identity)
            except (OSError, MemoryError) as error:
                raise as_checkpoint_error(error, step) from error
    return plan, written, time.perf_counter() - begun
