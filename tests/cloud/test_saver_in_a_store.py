"""A Saver whose directory is in a store: what is acknowledged is there, whole, and nothing else is ever seen."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
import asyncckpt.checkpoints
from asyncckpt.commit.discover import read_head
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.engine.upload.upload_attempt import upload_attempt
from asyncckpt.filters import WriteBlock
from asyncckpt.format.names import Attempt
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.storage.object_store import ObjectStore
from tests.cloud import seaweed
from tests.cloud.fault_proxy import FAULTS, FaultProxy, Mishap, Request, first
from tests.cloud.small_parts import is_equal, keys, objects, small_parts, state

__all__ = ["small_parts"]  # Every test of this file has it.


@pytest.fixture
def behind(proxy: FaultProxy, url: str, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The store itself, for what is done while the proxy waits."""
    with monkeypatch.context() as direct:
        direct.setenv("AWS_ENDPOINT_URL", proxy.target)
        return ObjectStore(StoreUrl.of(url))


@pytest.mark.parametrize("staged", [True, False])
def test_what_changes_behind_the_call_is_not_in_the_checkpoint(owner: seaweed.Server, url: str, staged: bool) -> None:
    tensors = state()
    with asyncckpt.Saver(path=url, tensors=tensors, parallel=2) as saver:
        for step in range(3):
            for tensor in tensors.values():
                tensor.fill_(step)
            future = saver.save_async(step) if staged else None
            result = saver.save(step) if future is None else None
            for tensor in tensors.values():
                tensor.fill_(-1)
            assert (result or future.result()).step == step
        saver.wait_idle()
        assert saver.path == url
    for step in range(3):
        asyncckpt.verify(url, step)
        assert is_equal(asyncckpt.load(url, step), step)
    assert asyncckpt.list_steps(url) == [0, 1, 2]


def test_tables_deltas_filters_and_retention(owner: seaweed.Server, url: str) -> None:
    table, dense = asyncckpt.HashTable("t", 4), torch.zeros(10)

    def keep(blocks: list[WriteBlock]) -> list[WriteBlock]:
        return list(blocks)

    options: dict[str, Any] = {"hashtables": {"t": table}, "tensors": {"dense": dense}, "filter_func": keep, "keep": 2}
    with asyncckpt.Saver(path=url, **options) as saver:
        for step in range(6):
            table.insert(torch.arange(step, step + 1000), torch.full((1000, 4), float(step)))
            dense.fill_(step)
            saver.save_async(step, kind="full" if step % 3 == 0 else "delta").result()
            saver.wait_idle()
    assert asyncckpt.list_steps(url) == [3, 4, 5]
    assert len({key.split("/")[1] for key in objects(url)}) == 3
    assert objects(url, "manifests") == {
        f"manifests/{name}" for name in [".probe", *(f"{s:012}.json" for s in (3, 4, 5))]
    }
    found = asyncckpt.HashTable("t", 4)
    asyncckpt.Loader(url, {"t": found}, {"dense": dense}).load()
    rows = found.embedding[found.lookup(torch.arange(1005), insert=False)][:, 0]
    expected = torch.cat([torch.arange(5), torch.full((1000,), 5)]).float()
    assert torch.equal(rows, expected)


def test_a_save_that_is_refused_leaves_nothing(proxy: FaultProxy, url: str) -> None:
    with asyncckpt.Saver(path=url, tensors=state(), parallel=2) as saver:
        proxy.fault = lambda request: Mishap(answer=(403, "AccessDenied")) if request.kind == "put" else None
        for _ in range(2):
            with pytest.raises(asyncckpt.IOFailedError, match="AccessDenied"):
                saver.save_async(0).result()
        assert objects(url) == set()
        proxy.fault = lambda request: None
        saver.save(0)
    assert is_equal(asyncckpt.load(url), 1)


@pytest.mark.parametrize("kind", ["complete upload", "put"])
def test_files_that_vanish_are_missed(proxy: FaultProxy, url: str, behind: ObjectStore, kind: str) -> None:
    """A cleaner: what it takes before the manifest comes is not published, what it takes right behind it not said."""

    def remove_files() -> None:
        for key in keys(behind):
            behind.remove(key)

    def disturb(request: Request) -> Mishap | None:
        is_meant = request.kind == kind and (kind != "put" or "/manifests/0" in request.path)
        return Mishap(when_done=remove_files) if is_meant else None

    with asyncckpt.Saver(path=url, tensors=state(), parallel=1) as saver:
        proxy.fault = disturb
        with pytest.raises(asyncckpt.CheckpointError, match="missing") as raised:
            saver.save_async(0).result()
        proxy.fault = lambda request: None
        if kind == "put":
            assert isinstance(raised.value, asyncckpt.IndeterminateError)
            assert not raised.value.resolve()
        else:
            assert objects(url, "manifests") == {"manifests/.probe"}


def test_of_two_writers_one_wins_and_the_other_says_so(
    proxy: FaultProxy, url: str, tmp_path: Path, behind: ObjectStore
) -> None:
    """Neither sees the other before it publishes: the other's manifest comes right before this one's."""
    asyncckpt.save(tmp_path / "other", state(2), step=0)

    def let_the_other_win(request: Request) -> None:
        if request.kind == "put" and request.path.endswith("000.json"):
            proxy.fault = lambda request: None
            with CheckpointRoot.for_reading(tmp_path / "other") as root:
                attempt = Attempt(0, read_head(root, 0).attempt)
            upload_attempt(tmp_path / "other", behind, attempt, asyncckpt.UploadOptions(url))

    with asyncckpt.Saver(path=url, tensors=state(1)) as saver:
        proxy.fault = let_the_other_win
        with pytest.raises(asyncckpt.ConflictError, match="step 0 already exists"):
            saver.save_async(0).result()
        with pytest.raises(asyncckpt.ConflictError, match="step 0 already exists"):
            saver.save(0)
        assert saver.save().step == 1
    assert is_equal(asyncckpt.load(url, 0), 2)
    assert is_equal(asyncckpt.load(url, 1), 1)
    assert len({key.split("/")[1] for key in objects(url)}) == 2, "what has lost is gone"


def test_what_others_have_saved_or_removed_is_seen_by_the_next_call(owner: seaweed.Server, url: str) -> None:
    with asyncckpt.Saver(path=url, tensors=state(1)) as saver:
        saver.save(5)
        asyncckpt.checkpoints.remove(url, 5)
        assert saver.save(5).step == 5
        asyncckpt.save(url, state(2), step=7)
        with pytest.raises(asyncckpt.ConflictError, match="step 7 already exists"):
            saver.save_async(7).result()
        assert saver.save().step == 8


@pytest.mark.parametrize("name", ["500 after success", "silent after success"])
def test_a_save_whose_answer_was_lost_is_remembered(proxy: FaultProxy, url: str, name: str) -> None:
    with asyncckpt.Saver(path=url, tensors=state(1)) as saver:
        saver.save()
        proxy.fault = first("put", [FAULTS[name]], where="/manifests/")
        assert saver.save().step == 1
        assert saver.save().step == 2
    assert asyncckpt.list_steps(url) == [0, 1, 2]


def test_no_call_of_the_loop_asks_the_store(owner: seaweed.Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, asking, ask = asyncckpt.HashTable("t", 2), set(), ObjectStore._ask
    table.insert(torch.arange(9), torch.zeros(9, 2))

    def noted(self: ObjectStore, *arguments: Any, **options: Any) -> Any:
        asking.add(threading.get_ident())
        return ask(self, *arguments, **options)

    with asyncckpt.Saver(path=url, hashtables={"t": table}, tensors=state(), keep=2) as saver:
        saver.save(0)
        monkeypatch.setattr(ObjectStore, "_ask", noted)
        for kind in ("delta", "full", "delta", "delta"):
            table.insert(torch.arange(3), torch.ones(3, 2))
            saver.save_async(kind=kind, on_busy="wait")
        saver.wait_idle()
    assert asking
    assert threading.get_ident() not in asking


def test_the_first_step_of_a_loop_asks_the_store_before_it_is_refused_alone(proxy: FaultProxy, url: str) -> None:
    model = torch.nn.Linear(2, 2)
    with asyncckpt.Checkpointer(url, every=10, model=model) as checkpointer:
        proxy.requests = []
        checkpointer.step(1)
        assert proxy.requests == []
    with asyncckpt.Checkpointer(url, every=10, model=model) as checkpointer:
        with pytest.raises(asyncckpt.UsageError, match="not above"):
            checkpointer.step(1)
        asyncckpt.checkpoints.remove(url, 1)
        checkpointer.step(1)


def test_a_loop_whose_last_step_is_acknowledged_ends_well_without_the_store(proxy: FaultProxy, url: str) -> None:
    with asyncckpt.Checkpointer(url, every=1, model=torch.nn.Linear(2, 2)) as checkpointer:
        future = checkpointer.step(1)
        assert future is not None
        future.result()
        checkpointer._saver.wait_idle()
        proxy.fault = lambda request: Mishap(answer=(403, "ExpiredToken"))
    proxy.fault = lambda request: None
    assert asyncckpt.list_steps(url) == [1]


def test_a_save_asks_as_often_as_the_page_says(proxy: FaultProxy, url: str) -> None:
    with asyncckpt.Saver(path=url, tensors=state(), parallel=1) as saver:
        proxy.requests = []
        saver.save_async(0).result()
        kinds = Counter(request.kind for request in proxy.requests)
    assert kinds == {"begin upload": 1, "part": 3, "complete upload": 1, "put": 1, "list": 7, "head": 1, "get": 1}


def test_a_store_that_fails_for_a_while_is_tried_again(
    proxy: FaultProxy, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Longer than the client tries by itself; from the arena, which holds all of it still."""

    def disturb(request: Request) -> Mishap | None:
        is_logged = "SlowDown: it is tried again for" in caplog.text
        return Mishap(answer=(503, "SlowDown")) if request.kind == "part" and not is_logged else None

    with asyncckpt.Saver(path=url, tensors=state(3), parallel=1) as saver:
        proxy.fault = disturb
        assert saver.save_async(0).result().step == 0
    assert "SlowDown: it is tried again for" in caplog.text
    assert is_equal(asyncckpt.load(url), 3)


def test_a_cancelled_save_leaves_nothing(proxy: FaultProxy, url: str) -> None:
    with asyncckpt.Saver(path=url, tensors=state(), parallel=2) as saver:
        proxy.fault = lambda request: Mishap(answer=(503, "SlowDown")) if request.kind == "part" else None
        future = saver.save_async(0)
        while not proxy.of_kind("part"):
            time.sleep(0.01)
        assert future.cancel()
        with pytest.raises(asyncckpt.SaveCancelledError):
            future.result()
        proxy.fault = lambda request: None
        assert objects(url) == set()
        saver.save(0)
    assert is_equal(asyncckpt.load(url), 1)


def test_what_needs_a_disk_is_refused(owner: seaweed.Server, url: str) -> None:
    tensors = state()
    with pytest.raises(asyncckpt.UsageError, match="upload is for a directory on a disk"):
        asyncckpt.Saver(path=url, tensors=tensors, upload=f"{url}/other")
    with pytest.raises(asyncckpt.UnsupportedError, match="by files need a directory on a disk"):
        asyncckpt.Saver(0, 2, path=url, tensors=tensors)
    with asyncckpt.Saver(path=url, tensors=tensors) as saver:
        saver.save(0)
        saver.save_async(1).wait_uploaded()


def test_stores_that_cannot_be_used_are_refused_at_once(
    proxy: FaultProxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(asyncckpt.NotFoundError, match="NoSuchBucket"):
        asyncckpt.Saver(path="s3://no-such-bucket/run", tensors=state())
    for name, value in seaweed.environment(proxy.endpoint, seaweed.READER).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(asyncckpt.IOFailedError, match="AccessDenied") as raised:
        asyncckpt.Saver(path=url, tensors=state())
    assert seaweed.READER.secret not in str(raised.value)


def test_the_five_lines_work_in_a_store(owner: seaweed.Server, url: str) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    expected = []
    for _ in range(2):
        with asyncckpt.Checkpointer(url, every=2, keep=2, model=model, optimizer=optimizer) as checkpointer:
            start = checkpointer.restore()
            for step in range(start, start + 5):
                optimizer.zero_grad()
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
                checkpointer.step(step)
        expected.append((start, model.weight.detach().clone()))
        with torch.no_grad():
            model.weight.zero_()
    assert [start for start, _ in expected] == [0, 5]
    assert torch.equal(asyncckpt.load(url)["model"]["weight"], expected[1][1])
    with asyncckpt.Checkpointer(url, every=2, model=model, optimizer=optimizer) as checkpointer:
        assert checkpointer.restore(4, discard_newer=True) == 5
        assert torch.equal(model.weight, expected[0][1])
        checkpointer.step(5)
    assert asyncckpt.list_steps(url)[-2:] == [4, 5]


def test_steps_are_removed_pinned_and_pruned_in_a_store(owner: seaweed.Server, url: str) -> None:
    checkpoints = asyncckpt.checkpoints
    for step in range(6):
        asyncckpt.save(url, {"w": torch.full((9,), float(step))}, step=step)
    checkpoints.pin(url, 1)
    assert checkpoints.pinned_steps(url) == [1]
    assert checkpoints.remove(url, [0, 2]) == [0, 2]
    with pytest.raises(asyncckpt.UsageError, match="is pinned"):
        checkpoints.remove(url, 1)
    assert checkpoints.prune(url, 1).removed == (3, 4)
    assert asyncckpt.list_steps(url) == [1, 5]
    assert checkpoints.unpin(url, 1)
    assert checkpoints.remove_after(url, 1) == [5]
    store = ObjectStore(StoreUrl.of(url))
    store.put(
        "data/000000000009-0123456789abcdef0123456789abcdef/r00000-000.safetensors", [b"x"], part_bytes=1, parallel=1
    )
    assert checkpoints.collect_garbage(url).folders_count == 1
    assert {key.split("/")[1].split("-")[0] for key in objects(url)} == {"000000000001"}
    assert objects(url, "manifests") == {"manifests/.probe", "manifests/000000000001.json"}
