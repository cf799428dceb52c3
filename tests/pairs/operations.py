"""The public operations, each to its end, and the table of what may refuse them beside another one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import asyncckpt
import asyncckpt.dcp
from asyncckpt.errors import ConflictError, NotFoundError, SaveCancelledError, SaveInProgressError, UsageError
from asyncckpt.strategies import ShardedLoad, ShardedSave
from tests.pairs.gate import Place
from tests.pairs.world import POLICY, WAIT_S_MAX, TwoSides

POLL_S = 0.005


@dataclass(frozen=True)
class Operation:
    """run: takes the world and a side; returns the step that it has saved in run/, if that is what it does.

    traits: see REFUSALS; and "writes" to its room, "saves" in run/, "fills" all of the live state, its "dense" tensors,
    or the "module".
    places: where it can be held, beside the storage. room: its directory.
    """

    name: str
    run: Callable[[TwoSides, int], int | None]
    traits: frozenset[str]
    places: tuple[Place, ...]
    room: str

    def __str__(self) -> str:
        return self.name


# What an operation of the first trait may raise beside one of the second. Anything else must end well.
REFUSALS: tuple[tuple[str, str, type[Exception]], ...] = (
    ("raises when busy", "locks", SaveInProgressError),
    ("uses its Saver", "closes", UsageError),
    ("uses its module's Saver", "closes modules", UsageError),
    ("builds upon a step", "removes", ConflictError),
    ("names a step", "removes", NotFoundError),
    ("folds", "folds", ConflictError),
    ("wants all tensors", "removes tensors", NotFoundError),
    ("removes tensors", "removes tensors", ConflictError),
    ("removes tensors", "saves sharded", ConflictError),
)


def may_raise(operation: Operation, other: Operation, error: BaseException, *, same_saver: bool) -> bool:
    return any(
        own in operation.traits
        and its in other.traits
        and isinstance(error, kind)
        and (same_saver or not its.startswith("closes"))
        for own, its, kind in REFUSALS
    )


def save_async(world: TwoSides, side: int, **options: Any) -> int:
    return world.saver(side).save_async(**options).result(WAIT_S_MAX).step


def save(world: TwoSides, side: int) -> int:
    return world.saver(side).save().step


def cancel(world: TwoSides, side: int) -> int | None:
    """A save that ends as cancelled, or has committed."""
    future = world.saver(side).save_async()
    future.cancel()
    with contextlib.suppress(SaveCancelledError):
        return future.result(WAIT_S_MAX).step
    return None


def prune(world: TwoSides, side: int) -> int:
    saver = world.saver("pruner")
    step = saver.save_async(on_busy=POLICY).result(WAIT_S_MAX).step
    saver.wait_idle(WAIT_S_MAX)
    return step


def load(world: TwoSides, side: int) -> None:
    asyncckpt.Loader(world.run, world.state.tables, world.state.tensors).load()


def load_async(world: TwoSides, side: int) -> None:
    loader = asyncckpt.Loader(world.run, world.state.tables, world.state.tensors, on_busy=POLICY)
    loader.load_async().result(WAIT_S_MAX)


def follow(world: TwoSides, side: int) -> None:
    async def take_one() -> None:
        async with asyncckpt.follow(world.run, poll_seconds=POLL_S) as follower:
            update = await anext(aiter(follower))
            await update.load(world.state.tables, world.state.tensors)

    asyncio.run(asyncio.wait_for(take_one(), WAIT_S_MAX))


def verify(world: TwoSides, side: int) -> None:
    asyncckpt.verify(world.run, asyncckpt.list_steps(world.run)[0])


def describe(world: TwoSides, side: int) -> None:
    asyncckpt.describe(world.run)


def compact(world: TwoSides, side: int) -> None:
    world.saver(side).compact().result(WAIT_S_MAX)


def compact_offline(world: TwoSides, side: int) -> None:
    asyncckpt.compact(world.run)


def prepare(world: TwoSides, side: int) -> None:
    world.saver(side).prepare().result(WAIT_S_MAX)


def close(world: TwoSides, side: int) -> None:
    world.saver(side).close()


def dcp_save(world: TwoSides, side: int) -> None:
    dcp.save(dict(world.state.dense), storage_writer=asyncckpt.dcp.StorageWriter(world.dcp))


def dcp_async_save(world: TwoSides, side: int) -> None:
    writer = asyncckpt.dcp.StorageWriter(world.dcp, keep=2)
    saved = dcp.async_save(dict(world.state.dense), storage_writer=writer)
    getattr(saved, "upload_completion", saved).result(WAIT_S_MAX)


def dcp_load(world: TwoSides, side: int) -> None:
    dcp.load(dict(world.state.dense), storage_reader=asyncckpt.dcp.StorageReader(world.run))


def sharded_save(world: TwoSides, side: int) -> None:
    ShardedSave().save(world.state.sharded, world.mcore)


def sharded_load(world: TwoSides, side: int) -> None:
    ShardedLoad().load(world.state.sharded, world.mcore)


def remove_tensors(world: TwoSides, side: int) -> None:
    ShardedLoad().remove_sharded_tensors(world.mcore, "optimizer.")


def module_save(world: TwoSides, side: int) -> None:
    world.module_saver(side).save_async(world.state.module, world.emb).result(WAIT_S_MAX)


def module_load(world: TwoSides, side: int) -> None:
    world.module_saver(side).load(world.state.module, world.emb)


def module_close(world: TwoSides, side: int) -> None:
    world.module_saver(side).close()


def _delta(world: TwoSides, side: int) -> int:
    return save_async(world, side, kind="delta")


def _queued(world: TwoSides, side: int) -> int:
    return save_async(world, side, on_busy="queue")


def _made(
    name: str, run: Callable[[TwoSides, int], int | None], traits: str, places: str = "", room: str = "run"
) -> Operation:
    found = frozenset(filter(None, (trait.strip() for trait in traits.split(","))))
    return Operation(name, run, found, tuple(places.split()), room)


SAVE = "state_dict filter"
LOAD = "fill load_state_dict"
OPERATIONS = (
    _made("save_async", save_async, "writes, saves, locks, raises when busy, uses its Saver", SAVE),
    _made("delta", _delta, "writes, saves, locks, raises when busy, uses its Saver, builds upon a step", SAVE),
    _made("blocking save", save, "writes, saves, locks, uses its Saver", SAVE),
    _made("queued save", _queued, "writes, saves, locks, uses its Saver", SAVE),
    _made("cancelled save", cancel, "cancels, writes, saves, locks, raises when busy, uses its Saver", "state_dict"),
    _made("retention", prune, "writes, saves, locks, removes", SAVE),
    _made("load", load, "fills, locks", LOAD),
    _made("load_async", load_async, "fills, locks", LOAD),
    _made("follow", follow, "fills, locks", LOAD),
    _made("verify", verify, "names a step", "read"),
    _made("describe", describe, ""),
    _made("compact", compact, "writes, folds, uses its Saver, names a step", "read"),
    _made("offline compact", compact_offline, "writes, folds, names a step", "read"),
    _made("prepare", prepare, "writes, uses its Saver", "state_dict"),
    _made("close", close, "writes, closes"),
    _made("dcp.save", dcp_save, "writes, locks", room="dcp"),
    _made("dcp.async_save", dcp_async_save, "writes, locks", room="dcp"),
    _made("dcp.load", dcp_load, "locks, dense", "fill"),
    _made("sharded save", sharded_save, "writes, locks, saves sharded", room="mcore"),
    _made("sharded load", sharded_load, "locks, dense, wants all tensors", "fill", "mcore"),
    _made("remove_sharded_tensors", remove_tensors, "writes, removes tensors", room="mcore"),
    _made("module save", module_save, "writes, locks, raises when busy, uses its module's Saver", room="emb"),
    _made("module load", module_load, "locks, module, uses its module's Saver", "read", "emb"),
    _made("module close", module_close, "closes modules", room="emb"),
)
BY_NAME = {operation.name: operation for operation in OPERATIONS}


def cause_of(error: BaseException) -> BaseException:
    """What DCP wraps into an error of its own."""
    if isinstance(error, CheckpointException):
        [(cause, _)] = error.failures.values()
        return cause
    return error
