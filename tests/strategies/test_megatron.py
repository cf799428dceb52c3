"""Megatron-Core itself, with its own objects and functions, saves and loads with our strategies.

Needs megatron-core, of any version: `make test-megatron` fetches it and runs this.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt import strategies
from asyncckpt.errors import IncompatibleError, NotFoundError, UnsupportedError, UsageError
from tests.strategies.rank_runs import run_ranks

IS_THERE = importlib.util.find_spec("megatron") is not None
pytestmark = pytest.mark.any_core
needs_megatron = pytest.mark.skipif(not IS_THERE, reason="megatron-core is not installed: make test-megatron")
WHOLE = torch.arange(24.0).reshape(4, 6)


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Megatron's modules, in a process group of one rank."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing import core, mapping
        from megatron.core.dist_checkpointing.strategies import async_utils, fully_parallel

        yield SimpleNamespace(
            checkpointing=dist_checkpointing,
            exception=core.CheckpointingException,
            mapping=mapping,
            async_utils=async_utils,
            wrapper=fully_parallel.FullyParallelSaveStrategyWrapper,
        )
    finally:
        dist.destroy_process_group()


@pytest.fixture
def doors(megatron: Any) -> SimpleNamespace:
    """What to hand to Megatron's save and load: names in its registry where it has one, objects otherwise."""
    try:
        made = strategies.register_with_megatron(peer_deadline=60.0)
    except UnsupportedError:
        made = strategies.megatron_strategies(peer_deadline=60.0)
        wrapped = megatron.wrapper(made.save_sharded, backend="asyncckpt", version=1)
        return SimpleNamespace(save=wrapped, load=made.load_sharded, made=made, has_registry=False)
    return SimpleNamespace(save=("asyncckpt", 1), load=None, made=made, has_registry=True)


def state(megatron: Any, *, data: bool) -> dict[str, Any]:
    """A state dict with Megatron's own objects, with or without what is to be saved."""
    mapping = megatron.mapping
    rows = [WHOLE[:1], WHOLE[1:2], WHOLE[2:3], WHOLE[3:]]
    extra = {"buffer": io.BytesIO(b"fp8"), "amax": torch.ones(2)} if data else None
    return {
        "w": [
            mapping.ShardedTensor.from_rank_offsets("w", (row if data else torch.zeros_like(row)).clone(), (0, n, 4))
            for n, row in enumerate(rows)
        ],
        "layer": mapping.ShardedTensor.from_rank_offsets(
            "layers", torch.full((2,), 3.0 if data else 0.0), (0, 0, 1), prepend_axis_num=1
        ),
        "extra": mapping.ShardedObject("extra", extra, (1,), (0,)),
        "args": argparse.Namespace(lr=0.1),
        "iteration": 12,
    }


def check(loaded: dict[str, Any]) -> None:
    assert torch.equal(torch.cat(loaded["w"]), WHOLE)
    assert loaded["layer"].tolist() == [3.0, 3.0]
    assert loaded["extra"]["buffer"].read() == b"fp8"
    assert loaded["extra"]["amax"].tolist() == [1.0, 1.0]


@pytest.mark.skipif(IS_THERE, reason="megatron-core is installed")
def test_without_megatron_our_strategies_work_and_say_what_is_missing() -> None:
    assert not any(name.startswith("megatron") for name in sys.modules)
    for function in (strategies.megatron_strategies, strategies.register_with_megatron):
        with pytest.raises(NotFoundError, match="Megatron-Core cannot be imported"):
            function()


@needs_megatron
def test_megatrons_save_and_load_use_our_strategies(megatron: Any, doors: Any, tmp_path: Path) -> None:
    megatron.checkpointing.save(state(megatron, data=True), str(tmp_path), sharded_strategy=doors.save)
    asyncckpt.verify(tmp_path / "sharded")
    if not reads_common_by_itself(megatron):
        common = doors.made.load_common.load_common(tmp_path)
        assert (common["iteration"], common["args"]) == (12, argparse.Namespace(lr=0.1))
        sharded = {key: value for key, value in state(megatron, data=False).items() if key in ("w", "layer", "extra")}
        check(doors.made.load_sharded.load(sharded, tmp_path))
        return
    loaded = megatron.checkpointing.load(state(megatron, data=False), str(tmp_path), sharded_strategy=doors.load)
    check(loaded)
    assert (loaded["iteration"], loaded["args"]) == (12, argparse.Namespace(lr=0.1))


@needs_megatron
def test_megatron_finds_our_metadata(megatron: Any, doors: Any, tmp_path: Path) -> None:
    megatron.checkpointing.save(state(megatron, data=True), str(tmp_path), sharded_strategy=doors.save)
    found = megatron.checkpointing.load_tensors_metadata(str(tmp_path), sharded_strategy=doors.load)
    assert {key: (type(item), item.global_shape) for key, item in found.items()} == {
        "w": (megatron.mapping.ShardedTensor, (4, 6)),
        "layers": (megatron.mapping.ShardedTensor, (1, 2)),
    }
    if not reads_common_by_itself(megatron):
        return
    loaded, missing, unexpected = megatron.checkpointing.load(
        state(megatron, data=False), str(tmp_path), sharded_strategy=doors.load, strict="return_all"
    )
    check(loaded)
    assert (missing, unexpected) == (set(), set())


@needs_megatron
def test_megatrons_own_queue_takes_our_requests(
    megatron: Any, doors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It forks a process that calls our async_fn, and agrees on a device that is not there without a GPU."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    before = state(megatron, data=True)
    request = megatron.checkpointing.save(before, str(tmp_path), sharded_strategy=doors.save, async_sharded_save=True)
    assert isinstance(request, megatron.async_utils.AsyncRequest)
    assert not (tmp_path / "metadata.json").exists()
    for piece in before["w"]:
        piece.data.zero_()
    queue = megatron.async_utils.AsyncCallsQueue()
    queue.schedule_async_request(request)
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    queue.close()
    assert (tmp_path / "metadata.json").exists()
    leaves = {key: value for key, value in state(megatron, data=False).items() if key in ("w", "layer", "extra")}
    check(doors.made.load_sharded.load(leaves, tmp_path))


@needs_megatron
def test_megatrons_registry_knows_all_four_actions(megatron: Any, doors: Any, tmp_path: Path) -> None:
    if not doors.has_registry:
        with pytest.raises(UnsupportedError, match="no registry"):
            strategies.register_with_megatron()
        return
    from megatron.core.dist_checkpointing.strategies import base

    found = [base.get_default_strategy(action, "asyncckpt", 1) for action in base.StrategyAction]
    made = doors.made
    assert {id(item) for item in found} == {
        id(item) for item in (made.save_common, made.load_common, made.save_sharded, made.load_sharded)
    }
    assert isinstance(made.save_sharded, base.AsyncSaveShardedStrategy)
    megatron.checkpointing.save(state(megatron, data=True), str(tmp_path), sharded_strategy=doors.save)
    megatron.checkpointing.remove_sharded_tensors(str(tmp_path), "layer")
    assert set(megatron.checkpointing.load_tensors_metadata(str(tmp_path))) == {"w"}


@needs_megatron
def test_the_wrapper_of_fully_parallel_saves_takes_our_strategy(megatron: Any, doors: Any, tmp_path: Path) -> None:
    wrapped = megatron.wrapper(doors.made.save_sharded)
    leaves = {key: value for key, value in state(megatron, data=True).items() if key in ("w", "layer", "extra")}
    wrapped.save(leaves, tmp_path)
    empty = {key: value for key, value in state(megatron, data=False).items() if key in leaves}
    check(doors.made.load_sharded.load(empty, tmp_path))


@needs_megatron
def test_what_our_strategies_raise_is_megatrons_exception_too(megatron: Any, doors: Any, tmp_path: Path) -> None:
    mapping, made = megatron.mapping, doors.made
    foreign = {"extra": mapping.ShardedObject("extra", object(), (1,), (0,))}
    for call in (
        lambda: made.save_sharded.save(foreign, tmp_path),
        lambda: made.save_sharded.async_save(foreign, tmp_path),
        lambda: made.save_common.save_common({"extra": object()}, tmp_path),
        lambda: made.save_common.save_sharded_objects(foreign, tmp_path),
    ):
        with pytest.raises(megatron.exception, match="which cannot be saved") as refused:
            call()
        assert isinstance(refused.value, UsageError)
    made.save_sharded.save({"w": mapping.ShardedTensor.from_rank_offsets("w", WHOLE)}, tmp_path)
    absent = {"w": mapping.ShardedTensor.from_rank_offsets("v", WHOLE)}
    other_shape = {"w": mapping.ShardedTensor.from_rank_offsets("w", WHOLE[:1])}
    with pytest.raises(megatron.exception, match="checkpoint was written by another backend"):
        made.load_common.check_backend_compatibility("torch")
    for wanted, kind in ((absent, NotFoundError), (other_shape, IncompatibleError)):
        with pytest.raises(megatron.exception) as missed:
            made.load_sharded.load(wanted, tmp_path)
        assert isinstance(missed.value, kind)


@needs_megatron
def test_two_ranks_save_through_the_wrapper(tmp_path: Path) -> None:
    run_ranks("megatron_process", 2, tmp_path / "store", tmp_path / "iter")
    for name in ("iter-False", "iter-True"):
        asyncckpt.verify(tmp_path / name / "sharded")
        files = [path.name for path in (tmp_path / name).rglob("*.safetensors")]
        assert sorted(files) == ["r00000-000.safetensors", "r00001-000.safetensors"]


def reads_common_by_itself(megatron: Any) -> bool:
    """Whether Megatron keeps its common state in a file of its own; from 0.19 on it looks for it in its own format."""
    from megatron.core.dist_checkpointing import serialization

    return hasattr(serialization, "save_common") or not hasattr(serialization, "_legacy_common_state_exists")
