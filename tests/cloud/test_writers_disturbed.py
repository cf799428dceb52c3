"""Whoever writes to a store beside a Saver (DCP, Megatron's strategies, imports, compactions, ranks in turn), while one
of its requests fails: what was there, or what is written, and never a third; then it is done again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import asyncckpt
from asyncckpt import checkpoints
from asyncckpt.dcp import StorageWriter
from asyncckpt.formats import hf
from asyncckpt.strategies import ShardedLoad, ShardedSave
from tests.cloud import test_dcp_in_a_store as of_dcp
from tests.cloud import test_ranks_in_turn_in_a_store as in_turn
from tests.cloud import test_strategies_in_a_store as of_megatron
from tests.cloud.fault_proxy import FAULTS, FaultProxy
from tests.shares import share_of
from tests.worlds.gates import nothing

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PLACES_COUNT = 3
QUICK = [name for name in FAULTS if "silent" not in name and "stall" not in name]


@dataclass(frozen=True)
class Disturbed:
    """prepare: make what is there before; write: what is disturbed; is_new: whether that is there, else what was."""

    prepare: Callable[[str, Path], None]
    write: Callable[[str, Path], None]
    is_new: Callable[[str], bool]


def steps_say(url: str, step: int) -> bool:
    """Whether a step is there beside the one before it; the newest is whole."""
    found = asyncckpt.list_steps(url)
    assert found in ([step - 1], [step - 1, step])
    asyncckpt.verify(url)
    return found[-1] == step


def dcp_is_new(url: str) -> bool:
    found = steps_say(url, 1)
    assert of_dcp.is_equal(asyncckpt.load(url), float(found))
    return found


def megatron_is_new(url: str) -> bool:
    found = ShardedLoad().load(of_megatron.state(0, data=False), url)
    value = found["rng"]["seed"]
    assert torch.equal(found["optimizer"], torch.full((9000,), value))
    assert torch.equal(torch.cat(found["w"]), torch.arange(6.0) + value)
    return bool(value == 2)


def removal_is_new(url: str) -> bool:
    keys = ShardedLoad().load_tensors_metadata(url).keys()
    assert "w" in keys
    asyncckpt.verify(f"{url}/sharded")
    return "optimizer.sum" not in keys


def prepare_import(url: str, folder: Path) -> None:
    with asyncckpt.Saver(path=folder / "ckpt", tensors={"x": torch.arange(9000.0)}) as saver:
        saver.save(0)
    hf.export_checkpoint(folder / "ckpt", folder / "hf")
    hf.import_checkpoint(folder / "hf", url)


def import_is_new(url: str) -> bool:
    assert torch.equal(asyncckpt.load(url)["x"], torch.arange(9000.0))
    return steps_say(url, 1)


def prepare_chain(url: str, _: Path) -> None:
    table = asyncckpt.HashTable("t", 2)
    with asyncckpt.Saver(path=url, hashtables={"t": table}) as saver:
        for step in range(3):
            table.insert(torch.arange(step, step + 40), torch.full((40, 2), float(step)))
            saver.save_async(step, kind="delta" if step else "full").result()


def compaction_is_new(url: str) -> bool:
    assert asyncckpt.list_steps(url) == [0, 1, 2]
    asyncckpt.verify(url)
    table = asyncckpt.HashTable("t", 2)
    asyncckpt.Loader(url, {"t": table}, step=2).load()
    expected = torch.tensor([0.0, 1.0, *[2.0] * 40])
    assert torch.equal(table.read(torch.arange(42))["embedding"][:, 0], expected)
    return checkpoints.describe(url, 2).compacted


def save_in_turn(url: str, value: int, *, is_again: bool = False) -> None:
    for rank in range(in_turn.RANKS):
        with in_turn.saver_of(url, rank, value=value) as saver:
            try:
                saver.save(value)
            except asyncckpt.PeerError:  # The parts of a step that failed: it is begun anew.
                if rank or is_again:
                    raise
                save_in_turn(url, value, is_again=True)
                return


def turns_are_new(url: str) -> bool:
    found = steps_say(url, 1)
    in_turn.check_loads(url, step=int(found), value=float(found), count=1)
    return found


def ignoring_path(write: Callable[[str], Any]) -> Callable[[str, Path], None]:
    def run(url: str, _: Path) -> None:
        write(url)

    return run


WRITERS = {
    "DCP": Disturbed(
        ignoring_path(lambda url: dcp.save(of_dcp.state(0), storage_writer=StorageWriter(url, step=0))),
        ignoring_path(lambda url: dcp.save(of_dcp.state(1), storage_writer=StorageWriter(url, step=1))),
        dcp_is_new,
    ),
    "strategies": Disturbed(
        ignoring_path(lambda url: ShardedSave().save(of_megatron.state(1), url)),
        ignoring_path(lambda url: ShardedSave().save(of_megatron.state(2), url)),
        megatron_is_new,
    ),
    "removal of tensors": Disturbed(
        ignoring_path(lambda url: ShardedSave().save(of_megatron.state(1), url)),
        ignoring_path(lambda url: ShardedLoad().remove_sharded_tensors(url, "optimizer")),
        removal_is_new,
    ),
    "import": Disturbed(
        prepare_import, lambda url, folder: nothing(hf.import_checkpoint(folder / "hf", url, step=1)), import_is_new
    ),
    "compaction": Disturbed(prepare_chain, ignoring_path(lambda url: asyncckpt.compact(url, 2)), compaction_is_new),
    "ranks in turn": Disturbed(
        ignoring_path(lambda url: save_in_turn(url, 0)), ignoring_path(lambda url: save_in_turn(url, 1)), turns_are_new
    ),
}
CASES = [(writer, fault) for writer in WRITERS for fault in QUICK]


def causes_of(error: Exception) -> list[BaseException]:
    return [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "fault"), share_of(CASES, "writers to a store", by=lambda case: case[0]))
def test_a_disturbed_writer_leaves_what_was_or_what_is_written(
    proxy: FaultProxy, url: str, tmp_path: Path, base_seed: int, name: str, fault: str
) -> None:
    writer = WRITERS[name]
    writer.prepare(f"{url}/0", tmp_path)
    begun = len(proxy.requests)
    writer.write(f"{url}/0", tmp_path)
    count = len(proxy.requests) - begun
    assert writer.is_new(f"{url}/0")
    for number, place in enumerate(random.Random(base_seed).sample(range(count), min(count, PLACES_COUNT)), 1):
        own = f"{url}/{number}"
        writer.prepare(own, tmp_path / str(number))
        at = len(proxy.requests) + place
        proxy.fault = lambda request, at=at: FAULTS[fault] if request.number == at else None  # type: ignore[misc]
        is_acknowledged = is_in_doubt = False
        try:
            writer.write(own, tmp_path / str(number))
            is_acknowledged = True
        except (asyncckpt.CheckpointError, CheckpointException) as error:
            causes = causes_of(error)
            assert all(isinstance(cause, asyncckpt.CheckpointError) for cause in causes), causes
            is_in_doubt = any(isinstance(cause, asyncckpt.IndeterminateError) for cause in causes)
            is_acknowledged = any("is committed, and could not be read back" in str(cause) for cause in causes)
        finally:
            proxy.fault = nothing
        is_new = writer.is_new(own)
        assert is_in_doubt or is_new == is_acknowledged, (place, proxy.requests[at:])
        if not is_new:
            writer.write(own, tmp_path / str(number))
            assert writer.is_new(own)
