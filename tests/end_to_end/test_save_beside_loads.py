"""No state is captured while a load, of whatever kind, may still fill it: a save that is queued waits for its end.

Every load is held where it is about to read, and let go while the save asks for the lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import asyncckpt
from asyncckpt import embcache
from asyncckpt.dcp import AsyncStager, StorageReader, StorageWriter
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.shard.reader import ChainReader
from asyncckpt.strategies import ShardedLoad, ShardedSave
from asyncckpt.strategies.mapping import ShardedTensor
from asyncckpt.strategies.stored_state import StoredState
from tests.embcache.models import CachedNet, image
from tests.worlds.gates import Gate

WAIT_S_MAX = 60
SIZE = 1000
State = dict[str, torch.Tensor]


class HeldReads(Gate):
    """Holds all reads of checkpoints."""

    def let_go_when_asked(self) -> None:
        """Let the load go on as soon as somebody waits for the lock, or does not."""
        assert self.reached.wait(WAIT_S_MAX)
        threading.Timer(0.05, self.open).start()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldReads]:
    held, run = HeldReads(), ChainReader.run

    def wait(self: ChainReader) -> None:
        held()
        run(self)

    monkeypatch.setattr(ChainReader, "run", wait)
    yield held
    held.open()
    assert save_lock.in_flight() == save_lock._asking == []


def filled(value: float) -> State:
    return {name: torch.full((SIZE,), value) for name in ("v", "w")}


def sharded(state: State) -> dict[str, ShardedTensor]:
    return {
        name: ShardedTensor(name, value, value.dtype, tuple(value.shape), tuple(value.shape), (0,), None)
        for name, value in state.items()
    }


def load(path: Path, state: State) -> None:
    asyncckpt.Loader(path / "saved", tensors=state).load()


def load_async(path: Path, state: State) -> None:
    asyncckpt.Loader(path / "saved", tensors=state).load_async().result(WAIT_S_MAX)


def load_dcp(path: Path, state: State) -> None:
    dcp.load(state, storage_reader=StorageReader(path / "by_dcp"), no_dist=True)


def load_strategy(path: Path, state: State) -> None:
    ShardedLoad().load(sharded(state), path / "by_strategy")


def load_update(path: Path, state: State) -> None:
    async def follow() -> None:
        async for update in asyncckpt.follow(path / "saved", until=1, poll_seconds=0.01):
            await update.load(tensors=state)

    asyncio.run(follow())


def save_queued(path: Path, state: State) -> State:
    with asyncckpt.Saver(path=path / "new", tensors=state) as saver:
        saver.save_async(1, on_busy="queue").result(WAIT_S_MAX)
    return loaded(path / "new")


def save_blocking(path: Path, state: State) -> State:
    with asyncckpt.Saver(path=path / "new", tensors=state) as saver:
        saver.save(1, on_busy="queue")
    return loaded(path / "new")


def save_dcp(path: Path, state: State) -> State:
    dcp.save(dict(state), storage_writer=StorageWriter(path / "new"), no_dist=True)
    return loaded(path / "new")


def stage(path: Path, state: State) -> State:
    staged = AsyncStager().stage(dict(state))
    assert isinstance(staged, dict)
    return staged


def save_strategy(path: Path, state: State) -> State:
    ShardedSave().save(sharded(state), path / "new")
    found: State = ShardedLoad().load(sharded(filled(-1.0)), path / "new")
    return found


def loaded(path: Path) -> State:
    state = filled(-1.0)
    asyncckpt.Loader(path, tensors=state).load()
    return state


LOADS = [load, load_async, load_dcp, load_strategy, load_update]
SAVES = [save_queued, save_blocking, save_dcp, stage, save_strategy]
# Of all pairs: each load beside the queued save, and each save beside load_async.
PAIRS = [(one, save_queued) for one in LOADS] + [(load_async, save) for save in SAVES[1:]]


@pytest.mark.parametrize(("fill", "save"), PAIRS, ids=lambda function: function.__name__)
def test_what_a_load_fills_is_captured_after_it(
    tmp_path: Path, held: HeldReads, fill: Callable[[Path, State], None], save: Callable[[Path, State], State]
) -> None:
    whole = filled(1.0)
    with asyncckpt.Saver(path=tmp_path / "saved", tensors=whole) as saver:
        saver.save(1)
    dcp.save(dict(whole), storage_writer=StorageWriter(tmp_path / "by_dcp"), no_dist=True)
    ShardedSave().save(sharded(whole), tmp_path / "by_strategy")
    state = filled(0.0)
    thread = threading.Thread(target=fill, args=(tmp_path, state))
    thread.start()
    held.let_go_when_asked()
    found = save(tmp_path, state)
    thread.join(WAIT_S_MAX)
    assert not thread.is_alive()
    assert {name: value.unique().tolist() for name, value in found.items()} == {"v": [1.0], "w": [1.0]}


def test_tables_of_a_module_are_captured_after_their_load(tmp_path: Path, held: HeldReads) -> None:
    whole, net = CachedNet().trained(range(8)), CachedNet()
    with embcache.Saver(rank=0) as saver:
        saver.save(whole, tmp_path / "saved")
    held.reached.clear()

    def fill() -> None:
        with embcache.Saver(rank=0) as saver:
            saver.load(net, tmp_path / "saved")

    thread = threading.Thread(target=fill)
    thread.start()
    held.let_go_when_asked()
    with embcache.Saver(rank=0, on_busy="queue") as saver:
        saver.save(net, tmp_path / "new")
        thread.join(WAIT_S_MAX)
        found = CachedNet()
        saver.load(found, tmp_path / "new")
    assert image(found) == image(whole)


def test_a_load_of_several_rounds_is_one(tmp_path: Path, held: HeldReads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied weights are filled one after the other, and no save comes in between."""
    ShardedSave().save(sharded(filled(1.0)), tmp_path / "by_strategy")
    held.open()
    state, second = filled(0.0), HeldReads()
    rounds: list[int] = []
    fill = StoredState.load

    def load(self: StoredState, targets: Any) -> None:
        rounds.append(len(rounds))
        if len(rounds) == 2:
            second()
        fill(self, targets)

    monkeypatch.setattr(StoredState, "load", load)
    tied = {"first": sharded(state)["w"], "second": sharded({"w": state["v"]})["w"]}
    thread = threading.Thread(target=lambda: ShardedLoad().load(tied, tmp_path / "by_strategy"))
    thread.start()
    second.let_go_when_asked()
    found = save_queued(tmp_path, state)
    thread.join(WAIT_S_MAX)
    assert rounds == [0, 1]
    assert {name: value.unique().tolist() for name, value in found.items()} == {"v": [1.0], "w": [1.0]}
