"""Every way to write a dense state as a checkpoint, and how to load it back.

A writer raises what its call raises, and InBackground for what only its future says. It leaves nothing open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import asyncckpt
import asyncckpt.dcp
from asyncckpt import filters
from asyncckpt.model.write_block import WriteBlock
from asyncckpt.strategies import ShardedLoad, ShardedSave
from asyncckpt.strategies.mapping import ShardedObject, ShardedTensor

State = dict[str, Any]
WAIT_S_MAX = 60.0
LAST = 1


class InBackground(Exception):
    """An error that a call has not raised, but what it has begun."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True)
class LimitWriter:
    """save(folder, state) as a step, in the folder's `root`; load(folder, state) returns what is there of it."""

    name: str
    save: Callable[[Path, State], None]
    load: Callable[[Path, State], State]
    root: str = "."
    step: int = LAST


def blank(value: Any) -> Any:
    """The same structure with other contents."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(child) for key, child in value.items()}
    return type(value)(map(blank, value)) if isinstance(value, (list, tuple)) else type(value)()


def leaves_of(value: Any, path: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Tensors and plain values by their dotted paths."""
    if isinstance(value, (dict, list, tuple)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: leaf for key, child in pairs for name, leaf in leaves_of(child, (*path, key)).items()}
    return {".".join(map(str, path)): value}


def as_it_is(blocks: list[WriteBlock]) -> list[WriteBlock]:
    """A write filter that replaces what it can by the same: everything is written by the way of filters."""
    return [block.replace(data=block.data.clone()) for block in blocks]


# -- Savers ------------------------------------------------------------------------------------------------------------


def every_row(columns: Any) -> torch.Tensor:
    ids: torch.Tensor = columns["id"]
    return ids >= 0


def table(rows: int = 3) -> asyncckpt.HashTable:
    made = asyncckpt.HashTable("table", 2)
    made.insert(torch.arange(rows), torch.ones(rows, 2))
    return made


def levels() -> asyncckpt.MultiLevelTable:
    made = asyncckpt.MultiLevelTable("table", 2, cache_rows=4, capacity=16)
    made.insert(torch.arange(8), torch.ones(8, 2))
    return made


def save_by(saver: asyncckpt.Saver, **options: Any) -> None:
    future = saver.save_async(LAST, **options)
    error = future.exception(WAIT_S_MAX)
    if error is not None:
        raise InBackground(error)


FIRST_TOUCH = asyncckpt.DeviceOptions(host_level="first_touch")


def saving(**options: Any) -> Callable[[Path, State], None]:
    def save(folder: Path, state: State) -> None:
        own = {name: make() for name, make in options.get("tables", {}).items()}
        others = {name: option for name, option in options.items() if name != "tables"}
        with asyncckpt.Saver(path=folder, tensors=state, hashtables=own, durability="none", **others) as saver:
            save_by(saver)

    return save


def save_blocking(folder: Path, state: State) -> None:
    with asyncckpt.Saver(path=folder, tensors=state, hashtables={"table": table()}, durability="none") as saver:
        saver.save(LAST)


def save_delta(folder: Path, state: State) -> None:
    held: State = {}
    user = table()
    with asyncckpt.Saver(path=folder, tensors=held, hashtables={"table": user}, durability="none") as saver:
        saver.save(LAST - 1)
        held.update(state)
        user.insert(torch.tensor([7]), torch.ones(1, 2))
        save_by(saver, kind="delta")


def compacted(folder: Path, state: State) -> None:
    save_delta(folder, state)
    asyncckpt.compact(folder, LAST)


def load_state(folder: Path, state: State) -> State:
    target = blank(state)
    report = asyncckpt.Loader(folder, tensors=target, strict=False).load()
    assert not report.missing
    return leaves_of(target) | dict(report.values)


# -- DCP ---------------------------------------------------------------------------------------------------------------


def save_dcp(folder: Path, state: State) -> None:
    writer = asyncckpt.dcp.StorageWriter(folder, step=LAST, durability="none")
    try:
        dcp.save(dict(state), storage_writer=writer, planner=asyncckpt.dcp.SavePlanner(), no_dist=True)
    except CheckpointException as error:
        raise unwrapped(error) from error


def stage_dcp(folder: Path, state: State) -> None:
    """As dcp.async_save does it, without the process group that it asks for."""
    writer = asyncckpt.dcp.StorageWriter(folder, step=LAST, durability="none")
    staged: Any = writer.stage(dict(state))
    try:
        dcp.save(staged, storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        raise unwrapped(error) from error


def unwrapped(error: CheckpointException) -> BaseException:
    (own,) = error.failures.values()
    found: BaseException = own[0]
    return found


def load_dcp(folder: Path, state: State) -> State:
    target = blank(state)
    dcp.load(target, storage_reader=asyncckpt.dcp.StorageReader(folder), no_dist=True)
    return leaves_of(target)


# -- strategies --------------------------------------------------------------------------------------------------------


def sharded(state: State) -> State:
    return {
        name: ShardedTensor.from_rank_offsets(name, value)
        if isinstance(value, torch.Tensor)
        else ShardedObject(name, value, (1,), (0,))
        for name, value in state.items()
    }


def save_strategy(folder: Path, state: State) -> None:
    folder.mkdir(exist_ok=True)
    ShardedSave().save(sharded(state), folder)


def removed(folder: Path, state: State) -> None:
    save_strategy(folder, state | {"removed.tensor": torch.ones(3)})
    ShardedLoad().remove_sharded_tensors(folder, "removed.")


def load_strategy(folder: Path, state: State) -> State:
    return leaves_of(ShardedLoad().load(sharded(blank(state)), folder))


WRITERS = [
    LimitWriter("async", saving(), load_state),
    LimitWriter("blocking", save_blocking, load_state),
    LimitWriter("filter_func", saving(filter_func=as_it_is, tables={"table": table}), load_state),
    LimitWriter(
        "row filters", saving(filters=[filters.keep_rows("table", every_row)], tables={"table": table}), load_state
    ),
    LimitWriter(
        "first touch",
        saving(device=FIRST_TOUCH, tables={"table": levels}),
        load_state,
    ),
    LimitWriter("delta", save_delta, load_state),
    LimitWriter("compaction", compacted, load_state),
    LimitWriter("dcp", save_dcp, load_dcp),
    LimitWriter("dcp staged", stage_dcp, load_dcp),
    LimitWriter("strategies", save_strategy, load_strategy, root="sharded", step=0),
    LimitWriter("remove", removed, load_strategy, root="sharded", step=0),
]
