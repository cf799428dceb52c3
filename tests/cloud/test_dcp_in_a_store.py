"""torch.distributed.checkpoint saves into a store and loads from it, through our writer and reader."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import asyncckpt
from asyncckpt import checkpoints
from asyncckpt.dcp import StorageReader, StorageWriter
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.storage.object_store import ObjectStore
from tests.cloud import seaweed
from tests.cloud.fault_proxy import FaultProxy, Mishap, Request
from tests.ranks.processes import await_ranks, start_rank
from tests.shares import share_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WAIT_S = 120.0
KILLS = [(victim, number) for victim in (0, 1) for number in (1, 3, 5, 7, 9, 11, 14)]


def state(value: float) -> dict[str, Any]:
    layers = {f"layer{number}": torch.full((1000 * number + 1, 3), value + number) for number in range(4)}
    return {"model": layers, "empty": torch.empty(0), "step": int(value), "name": "run"}


def is_equal(found: dict[str, Any], value: float) -> bool:
    expected = state(value)
    tensors = expected["model"]
    plain = (found["step"], found["name"]) == (expected["step"], expected["name"])
    return plain and all(torch.equal(found["model"][name], tensors[name]) for name in tensors)


def failing(text: str) -> Any:
    """Expect a save of DCP to fail, with one cause that says this."""
    return pytest.raises(
        CheckpointException, check=lambda error: [text in str(cause) for cause, _ in error.failures.values()] == [True]
    )


@pytest.mark.parametrize("host_memory_limit", [None, 0], ids=["staged", "streamed"])
def test_what_dcp_saves_is_loaded_by_dcp_and_by_a_loader(
    owner: seaweed.Server, url: str, host_memory_limit: int | None
) -> None:
    writer = StorageWriter(url, keep=2, host_memory_limit=host_memory_limit)
    assert writer.checkpoint_id == url
    for step in range(3):
        metadata = dcp.save(state(step), storage_writer=writer)
        assert metadata.storage_meta is not None
        assert metadata.storage_meta.checkpoint_id == url
    changed = state(3)
    future: Any = dcp.async_save(changed, storage_writer=writer)
    for tensor in changed["model"].values():
        tensor.fill_(-1)
    getattr(future, "upload_completion", future).result(60)
    assert asyncckpt.list_steps(url)[-2:] == [2, 3]
    for step in (2, 3):
        asyncckpt.verify(url, step)
        target = state(-1)
        dcp.load(target, storage_reader=StorageReader(url, step=step))
        assert is_equal(target, step)
    assert is_equal(asyncckpt.load(url), 3)


def test_the_url_may_be_given_to_the_call(owner: seaweed.Server, url: str) -> None:
    dcp.save(state(7), checkpoint_id=url, storage_writer=StorageWriter(f"{url}/not-here"))
    target = state(-1)
    dcp.load(target, checkpoint_id=url, storage_reader=StorageReader(f"{url}/not-here"))
    assert is_equal(target, 7)
    assert not ObjectStore(StoreUrl.of(f"{url}/not-here")).below("")


def test_a_step_that_exists_and_a_bucket_that_does_not_are_refused(owner: seaweed.Server, url: str) -> None:
    dcp.save(state(1), storage_writer=StorageWriter(url, step=4))
    with failing("already exists"):
        dcp.save(state(2), storage_writer=StorageWriter(url, step=4))
    with failing("NoSuchBucket"):
        dcp.save(state(2), storage_writer=StorageWriter("s3://no-such-bucket/run"))
    assert is_equal(asyncckpt.load(url), 1)
    assert StorageWriter.validate_checkpoint_id(url)
    assert not StorageWriter.validate_checkpoint_id("s3://")


def test_a_save_that_fails_leaves_nothing(proxy: FaultProxy, url: str) -> None:
    dcp.save(state(0), storage_writer=StorageWriter(url))

    def refuse(request: Request) -> Mishap | None:
        return Mishap(answer=(403, "AccessDenied")) if request.method == "PUT" and "/data/" in request.path else None

    proxy.fault = refuse
    with failing("AccessDenied"):
        dcp.save(state(1), storage_writer=StorageWriter(url))
    proxy.fault = lambda request: None
    assert asyncckpt.list_steps(url) == [0]
    assert checkpoints.collect_garbage(url).files_count == 0
    assert dcp.save(state(1), storage_writer=StorageWriter(url)) is not None
    assert is_equal(asyncckpt.load(url), 1)


@pytest.mark.parametrize(("victim", "number"), share_of(KILLS, "ranks of DCP that are killed"))
def test_a_killed_rank_leaves_whole_checkpoints(
    proxy: FaultProxy, url: str, tmp_path: Path, victim: int, number: int
) -> None:
    running: list[Any] = []
    left = [number]

    def kill(request: Request) -> Mishap | None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(running[victim].pid, signal.SIGKILL)
        return Mishap(silent=True) if left[0] <= 0 else None

    proxy.fault = kill
    for rank in range(2):
        more = {"AWS_ENDPOINT_URL": proxy.endpoint if rank == victim else proxy.target}
        running.append(start_rank("tests.cloud.dcp_rank", (rank, 2, tmp_path, url), tmp_path, **more))
    ended = await_ranks(running, WAIT_S)
    proxy.fault = lambda request: None
    assert ended[victim].status in (0, -signal.SIGKILL), [rank.output for rank in ended]
    try:
        steps = asyncckpt.list_steps(url)
    except asyncckpt.NotFoundError:
        steps = []
    said = {int(line.split()[1]) for rank in ended for line in rank.output.splitlines() if line.startswith("step ")}
    assert said <= {*steps}
    for step in steps:
        asyncckpt.verify(url, step)
        target = {"both": torch.zeros(4), **{f"own{rank}": torch.zeros(5000) for rank in range(2)}}
        dcp.load(target, storage_reader=StorageReader(url, step=step))
        assert all(bool((tensor == step).all()) for tensor in target.values())
    if ended[victim].status == 0:
        assert steps == [0, 1, 2]
