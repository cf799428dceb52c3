"""Uploads that are disturbed: the store holds a checkpoint whole or not at all, and nothing is lost for want of one."""

from __future__ import annotations

import errno
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.checkpoints import prune
from asyncckpt.engine.upload import upload_attempt, uploads
from asyncckpt.format.names import Attempt, parse
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.plan import image
from asyncckpt.storage import object_store
from asyncckpt.storage.object_store import ObjectStore
from tests.cloud import seaweed
from tests.cloud.fault_proxy import FAULTS, FaultProxy, Mishap, Request, first
from tests.cloud.small_parts import state

PART_BYTES = 5 << 20  # The least that S3 takes; a checkpoint of these tests has three in one file.


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES_MIN", PART_BYTES)
    monkeypatch.setattr(uploads, "FIRST_PAUSE_S", 0.01)


def options(url: str, *, deadline: float = 60.0, request_deadline: float = 10.0) -> asyncckpt.UploadOptions:
    return asyncckpt.UploadOptions(url, deadline=deadline, request_deadline=request_deadline)


def open_saver(
    path: Path, upload: asyncckpt.UploadOptions | None, *, keep: int | None = None
) -> tuple[asyncckpt.Saver, dict[str, torch.Tensor]]:
    tensors = state()
    return asyncckpt.Saver(path=path, tensors=tensors, upload=upload, parallel=1, keep=keep), tensors


def marks(path: Path) -> list[int]:
    found = [parse(file.name) for file in (path / "manifests").iterdir()]
    return sorted(name.step for name in found if name is not None and name.kind == "upload")


@pytest.mark.parametrize("kind", ["begin upload", "part", "complete upload", "put", "get", "list"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_disturbed_upload_comes_to_its_end(proxy: FaultProxy, url: str, tmp_path: Path, kind: str, name: str) -> None:
    if name == "412" and kind != "put":
        pytest.skip("only a conditional PUT is answered so")
    saver, tensors = open_saver(tmp_path / "ckpt", options(url, request_deadline=1.0))
    left = [FAULTS[name]]
    proxy.fault = first(kind, left)
    with saver:
        saver.save_async(0).wait_uploaded()
        proxy.fault = lambda request: None
        loaded = asyncckpt.load(url)
    assert left == [], "no such request came"
    assert all(torch.equal(loaded[key], tensor) for key, tensor in tensors.items())
    assert marks(tmp_path / "ckpt") == []


def test_an_upload_asks_as_often_as_the_page_says(proxy: FaultProxy, url: str, tmp_path: Path) -> None:
    saver, _ = open_saver(tmp_path / "ckpt", options(url))
    with saver:
        proxy.requests = []
        saver.save_async(0).wait_uploaded()
        kinds = Counter(request.kind for request in proxy.requests)
    parts_count = 3
    assert kinds == {"begin upload": 1, "part": parts_count, "complete upload": 1, "get": 3, "put": 1, "list": 3}


def test_what_a_store_refuses_is_raised_once_and_goes_on(proxy: FaultProxy, url: str, tmp_path: Path) -> None:
    saver, tensors = open_saver(tmp_path / "ckpt", options(url), keep=1)
    proxy.fault = lambda request: Mishap(answer=(403, "AccessDenied"))
    futures = [saver.save_async(step, on_busy="wait") for step in range(3)]
    for future in futures:
        with pytest.raises(asyncckpt.IOFailedError, match="AccessDenied"):
            future.wait_uploaded()
        assert future.result().step == future.step
    assert (saver.wait_idle(), marks(tmp_path / "ckpt")) == (None, [0, 1, 2])
    assert asyncckpt.list_steps(tmp_path / "ckpt") == [0, 1, 2]
    proxy.fault = lambda request: None
    tensors["bias"].fill_(7)
    saver.save_async(3).wait_uploaded()
    saver.close()
    assert asyncckpt.list_steps(url) == [0, 1, 2, 3]
    assert marks(tmp_path / "ckpt") == []


def test_a_store_that_refuses_is_asked_for_each_commit_once(proxy: FaultProxy, url: str, tmp_path: Path) -> None:
    saver, _ = open_saver(tmp_path / "ckpt", options(url))
    proxy.fault = lambda request: Mishap(answer=(403, "AccessDenied"))
    asked = []
    for step in range(6):
        proxy.requests = []
        with pytest.raises(asyncckpt.IOFailedError, match="AccessDenied"):
            saver.save_async(step).wait_uploaded()
        saver.wait_idle()
        asked.append(len(proxy.requests))
    assert asked == asked[:1] * 6
    proxy.fault = lambda request: Mishap(answer=(403, "AccessDenied")) if "000000000001" in request.path else None
    saver.save_async(6).wait_uploaded()
    with pytest.raises(asyncckpt.IOFailedError, match="AccessDenied"):
        saver.wait_idle()
    proxy.fault = lambda request: None
    saver.save(7)
    saver.close()
    assert (asyncckpt.list_steps(url), marks(tmp_path / "ckpt")) == ([*range(8)], [])


def test_an_error_that_nobody_has_got_is_raised_by_close(proxy: FaultProxy, url: str, tmp_path: Path) -> None:
    saver, _ = open_saver(tmp_path / "ckpt", options(url))
    proxy.fault = lambda request: Mishap(answer=(400, "ExpiredToken"))
    saver.save(0)
    with pytest.raises(asyncckpt.IOFailedError, match="expired"):
        saver.close()
    saver.close()


def test_retention_keeps_what_is_not_uploaded(proxy: FaultProxy, url: str, tmp_path: Path) -> None:
    saver, _ = open_saver(tmp_path / "ckpt", options(url), keep=1)
    proxy.fault = lambda request: Mishap(answer=(403, "AccessDenied"))
    for step in range(4):
        saver.save(step)
    with pytest.raises(asyncckpt.IOFailedError):
        saver.wait_idle()
    report = prune(tmp_path / "ckpt", asyncckpt.KeepPolicy(latest=1), dry_run=True)
    assert report.kept == {**{step: ("not uploaded",) for step in range(3)}, 3: ("latest", "not uploaded")}
    proxy.fault = lambda request: None
    saver.save(4)
    saver.wait_idle()
    saver.save(5)
    saver.close()
    assert asyncckpt.list_steps(tmp_path / "ckpt") == [5]
    assert asyncckpt.list_steps(url) == [0, 1, 2, 3, 4, 5]


def test_a_saver_without_upload_says_once_what_waits(
    proxy: FaultProxy, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver, _ = open_saver(tmp_path / "ckpt", options(url), keep=1)
    proxy.fault = lambda request: Mishap(answer=(403, "AccessDenied"))
    for step in range(3):
        saver.save(step)
    with pytest.raises(asyncckpt.IOFailedError):
        saver.close()
    caplog.clear()
    saver, _ = open_saver(tmp_path / "ckpt", None, keep=1)
    with saver:
        saver.save(3)
        saver.save(4)
    [told] = [record.getMessage() for record in caplog.records if "wait to be uploaded" in record.getMessage()]
    assert told.startswith("3 steps of ")
    assert told.endswith("[0, 1, 2]")
    assert asyncckpt.list_steps(tmp_path / "ckpt") == [0, 1, 2, 4]


def test_the_next_saver_goes_on_where_files_are_missing(
    proxy: FaultProxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "FILE_TARGET_BYTES", 1 << 20)
    tensors = state() | {f"t{number}": torch.full((2 << 20,), float(number)) for number in range(3)}
    saver = asyncckpt.Saver(path=tmp_path / "ckpt", tensors=tensors, upload=options(url), parallel=4)
    puts = iter(range(10))
    proxy.fault = lambda request: (
        Mishap(answer=(403, "AccessDenied")) if request.kind == "complete upload" and next(puts) >= 2 else None
    )
    saver.save(0)
    with pytest.raises(asyncckpt.IOFailedError):
        saver.close()
    assert len(asyncckpt.describe(tmp_path / "ckpt").files) == 4
    there = {found.key for found in ObjectStore(StoreUrl.of(url)).below("data")}
    proxy.fault, proxy.requests = lambda request: None, []
    with asyncckpt.Saver(path=tmp_path / "ckpt", tensors=tensors, upload=options(url), parallel=4) as saver:
        saver.wait_idle()
    again = {request.path for request in proxy.of_kind("part")}
    assert len(there) == 2
    assert len(again) == 2
    assert not any(path.endswith(key) for path in again for key in there)
    assert asyncckpt.verify(url).step == 0


def test_files_that_vanish_behind_the_publish_are_uploaded_again(
    proxy: FaultProxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, publish = ObjectStore(StoreUrl.of(url)), upload_attempt._publish

    def publish_and_lose(*where: Any) -> None:
        publish(*where)
        for found in store.below("data"):
            store.remove(found.key)

    saver, _ = open_saver(tmp_path / "ckpt", options(url))
    with saver:
        with monkeypatch.context() as losing:
            losing.setattr(upload_attempt, "_publish", publish_and_lose)
            with pytest.raises(asyncckpt.CorruptError, match="is not there"):
                saver.save_async(0).wait_uploaded()
        assert marks(tmp_path / "ckpt") == [0]
        [file] = (tmp_path / "ckpt" / "data").glob("*/*")
        raw = file.read_bytes()
        file.write_bytes(raw[:-1])
        saver.save(1)
        with pytest.raises(asyncckpt.CorruptError):
            saver.wait_idle()
        assert marks(tmp_path / "ckpt") == [0]
        file.write_bytes(raw)
        saver.save(2)
        saver.wait_idle()
    assert marks(tmp_path / "ckpt") == []
    assert asyncckpt.verify(url, step=0).step == 0


def test_of_two_writers_one_wins_and_the_other_says_so(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    first, _ = open_saver(tmp_path / "first", options(url))
    second, tensors = open_saver(tmp_path / "second", options(url))
    tensors["bias"].fill_(2)
    with first:
        first.save_async(0).wait_uploaded()
    future = second.save_async(0)
    with pytest.raises(asyncckpt.ConflictError, match="another checkpoint"):
        future.wait_uploaded()
    second.close()
    assert asyncckpt.load(url)["bias"][0] == 1
    assert asyncckpt.load(tmp_path / "second")["bias"][0] == 2


def test_a_writer_that_loses_at_the_last_moment_says_so(
    proxy: FaultProxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, _ = open_saver(tmp_path / "second", options(url))
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.target)  # For the proxy waits for the first one.
    first, _ = open_saver(tmp_path / "first", options(url))

    def let_the_first_win(request: Request) -> None:
        if request.kind == "put" and request.path.endswith("000.json"):
            proxy.fault = lambda request: None
            first.save_async(0).wait_uploaded()

    proxy.fault = let_the_first_win
    with first:
        with pytest.raises(asyncckpt.ConflictError, match="another checkpoint"):
            second.save_async(0).wait_uploaded()
        second.close()
    assert asyncckpt.verify(url).steps == (0,)


def test_damage_on_the_disk_does_not_get_into_the_store(proxy: FaultProxy, url: str, tmp_path: Path) -> None:
    saver, _ = open_saver(tmp_path / "ckpt", options(url))
    proxy.fault = lambda request: Mishap(answer=(403, "AccessDenied"))
    with pytest.raises(asyncckpt.IOFailedError):
        saver.save_async(0).wait_uploaded()
    [file] = (tmp_path / "ckpt" / "data").glob("*/*")
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    proxy.fault = lambda request: None
    saver.save(1)
    with pytest.raises(asyncckpt.CorruptError, match=r"'weight'.* was not uploaded"):
        saver.close()
    assert asyncckpt.list_steps(url) == [1]
    assert ObjectStore(StoreUrl.of(url)).below(f"data/{file.parent.name}") == []


def test_a_store_that_ignores_the_condition_is_refused(
    proxy: FaultProxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as direct:
        direct.setenv("AWS_ENDPOINT_URL", proxy.target)
        behind = ObjectStore(StoreUrl.of(url))

    def replace(request: Request) -> None:
        if "if-none-match" in request.headers:
            behind.remove(request.path.partition(f"{behind.url.prefix}/")[2])

    proxy.fault = replace
    with pytest.raises(asyncckpt.UnsupportedError, match="in spite of If-None-Match"):
        open_saver(tmp_path / "ckpt", options(url))
    proxy.fault = lambda request: None
    open_saver(tmp_path / "ckpt", options(url))[0].close()


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"url": "s3://no-such-bucket/run"}, asyncckpt.NotFoundError, "NoSuchBucket"),
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, asyncckpt.IOFailedError, "SignatureDoesNotMatch"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, asyncckpt.IOFailedError, "InvalidAccessKeyId"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, asyncckpt.IOFailedError, "connection failed"),
        ({"AWS_ALLOW_HTTP": "false"}, asyncckpt.UsageError, "not https"),
        (seaweed.environment("", seaweed.READER), asyncckpt.IOFailedError, "AccessDenied"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_at_once(
    owner: seaweed.Server,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, str],
    kind: type[asyncckpt.CheckpointError],
    words: str,
) -> None:
    for name, value in change.items():
        if name.startswith("AWS_") and value:
            monkeypatch.setenv(name, value)
    with pytest.raises(kind, match=words):
        open_saver(tmp_path / "ckpt", options(change.get("url", url), request_deadline=1.0))
    open_saver(tmp_path / "ckpt", None)[0].close()  # It has given the directory back.


def test_a_silent_store_is_given_up_at_the_deadline(proxy: FaultProxy, url: str, tmp_path: Path) -> None:
    saver, _ = open_saver(tmp_path / "ckpt", options(url, deadline=0.5, request_deadline=0.2))
    proxy.fault = lambda request: Mishap(silent=True)
    with pytest.raises(asyncckpt.IOFailedError, match="did not answer") as failed:
        saver.save_async(0).wait_uploaded()
    assert failed.value.errno == errno.ETIMEDOUT
    saver.close()


def test_an_outage_is_waited_for_once(
    proxy: FaultProxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many checkpoints wait behind the one that has used up its deadline."""
    tries: Counter[int] = Counter()

    def counted(path: Path, store: ObjectStore, attempt: Attempt, given: asyncckpt.UploadOptions) -> None:
        tries[attempt.step] += 1
        upload_attempt.upload_attempt(path, store, attempt, given)

    monkeypatch.setattr(uploads, "upload_attempt", counted)
    saver, _ = open_saver(tmp_path / "ckpt", options(url, deadline=4.0, request_deadline=0.5))
    proxy.fault = lambda request: Mishap(answer=(503, "SlowDown"))
    for step in range(4):
        saver.save(step)
    with pytest.raises(asyncckpt.IOFailedError, match="SlowDown"):
        saver.wait_idle()
    assert tries[0] > 1
    assert [tries[step] for step in (1, 2, 3)] == [1, 1, 1]
    proxy.fault = lambda request: None
    saver.close()


def test_a_wait_has_a_deadline(proxy: FaultProxy, url: str, tmp_path: Path) -> None:
    saver, _ = open_saver(tmp_path / "ckpt", options(url, deadline=0.0, request_deadline=3.0))
    proxy.fault = lambda request: Mishap(silent=True)
    future = saver.save_async(0)
    future.result()
    with pytest.raises(asyncckpt.DeadlineError, match="did not end"):
        future.wait_uploaded(0.1)
    proxy.fault = lambda request: None
    saver.close()


def test_a_save_without_a_store_has_nothing_to_wait_for(tmp_path: Path) -> None:
    saver, _ = open_saver(tmp_path / "ckpt", None)
    with saver:
        future = saver.save_async(0)
        with pytest.raises(asyncckpt.UsageError, match="not uploaded anywhere"):
            future.wait_uploaded()
        soon: Any = "soon"
        with pytest.raises(asyncckpt.UsageError, match="timeout must be"):
            future.wait_uploaded(soon)


def test_a_step_that_was_removed_is_not_asked_for_again(proxy: FaultProxy, url: str, tmp_path: Path) -> None:
    saver, _ = open_saver(tmp_path / "ckpt", options(url))
    proxy.fault = lambda request: Mishap(answer=(403, "AccessDenied"))
    saver.save(0)
    with pytest.raises(asyncckpt.IOFailedError):
        saver.close()
    asyncckpt.checkpoints.remove(tmp_path / "ckpt", [0])
    proxy.fault = lambda request: None
    saver, _ = open_saver(tmp_path / "ckpt", options(url))
    with pytest.raises(asyncckpt.NotFoundError, match="before it was uploaded"):
        saver.wait_idle()
    with saver:
        saver.save_async(1).wait_uploaded()
    assert marks(tmp_path / "ckpt") == []


def test_ranks_that_save_in_turn_are_refused(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    ranks = asyncckpt.RankOptions(in_turn=True)
    with pytest.raises(asyncckpt.UnsupportedError, match="in turn"):
        asyncckpt.Saver(0, 2, path=tmp_path / "ckpt", tensors=state(), upload=url, ranks=ranks)
