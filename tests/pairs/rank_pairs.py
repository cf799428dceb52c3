"""Pairs of operations of two ranks, each a function of (rank, folder, ...); run by test_two_ranks.py.

Both ranks hold the same operation at the same place, and run the other one there.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from asyncckpt.errors import (
    ConflictError,
    NotFoundError,
    PeerError,
    SaveCancelledError,
    SaveInProgressError,
    UsageError,
)
from tests.pairs.gate import Place, PlaceGate
from tests.pairs.operations import BY_NAME, Operation, may_raise
from tests.pairs.run_pairs import Running, check_world, overlap
from tests.pairs.world import TwoSides, check_no_directory_is_held
from tests.ranks.job_ranks import group_of

RANKS_COUNT = 2
ABORTED = "unless rank 0 has aborted the save"  # What a rank says that has not heard of it yet.
REFUSING = (ConflictError, NotFoundError, SaveInProgressError, UsageError)


def run_pairs(rank: int, folder: Path, pairs: Sequence[tuple[str, str, Place, int]]) -> None:
    """Run pairs: two names, the place where the first one is held, and how many Savers there are."""
    warnings.simplefilter("ignore")
    group_of(rank, RANKS_COUNT, folder)
    with PlaceGate().watching() as gate:
        world = TwoSides(gate, folder=folder, of=(rank, RANKS_COUNT), meet=dist.barrier)
        for first, second, place, sides in pairs:
            run_pair(world, BY_NAME[first], BY_NAME[second], place, sides=sides)
        world.close()
    check_no_directory_is_held()


def run_pair(world: TwoSides, first: Operation, second: Operation, place: Place, *, sides: int) -> None:
    print(f"{first} at {place} beside {second}, {sides} Savers", flush=True)
    world.gate.arm(None)
    world.renew(sides, ())
    one, two = ended = overlap(world, first, second, place, sides=sides)
    world.gate.arm(None)
    for own, other in ((one, two), (two, one)):
        if own.error is not None and not _may_raise(own, other, same_saver=sides == 1):
            raise AssertionError(f"{own.operation} beside {other.operation} failed") from own.error
    check_world(world, ended)


def _may_raise(own: Running, other: Running, *, same_saver: bool) -> bool:
    """Whether it may raise what it raised, or what another rank did."""
    error = own.error
    assert error is not None
    cause = error.cause if isinstance(error, PeerError) else ""
    # A close tells what another rank has cancelled, if nobody has asked the future by then.
    is_told = same_saver and "closes" in own.operation.traits and "cancels" in other.operation.traits
    is_cancelled = SaveCancelledError.__name__ in cause or ABORTED in str(error)
    if is_cancelled and ("cancels" in own.operation.traits or is_told):
        return True
    errors = [kind("") for kind in REFUSING if kind.__name__ in cause] or [error]
    return any(may_raise(own.operation, other.operation, one, same_saver=same_saver) for one in errors)
