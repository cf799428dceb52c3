"""Steps of a store are removed while answers are lost, while something is uploaded that builds
upon them, or while they are loaded.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
import asyncckpt.checkpoints
from asyncckpt.engine.load import run_load
from asyncckpt.engine.upload import upload_attempt
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.storage.object_store import ObjectStore
from tests.cloud import seaweed
from tests.cloud.fault_proxy import FAULTS, FaultProxy, Mishap, first
from tests.cloud.small_parts import is_equal, objects, state
from tests.cloud.test_uploads import marks, open_saver, options, small_parts

__all__ = ["small_parts"]


def test_a_step_that_was_saved_anew_has_no_leftovers(owner: seaweed.Server, url: str) -> None:
    """SeaweedFS goes on listing the prefix of the one that was removed."""
    for _ in range(2):
        asyncckpt.save(url, state(0), step=0)
        found = asyncckpt.verify(url).strays
        asyncckpt.checkpoints.remove(url, 0)
    assert found == ()


def test_who_may_not_remove_hears_why(proxy: FaultProxy, url: str) -> None:
    asyncckpt.save(url, state(0), step=0)
    proxy.fault = lambda request: Mishap(answer=(403, "AccessDenied")) if request.kind == "delete" else None
    for _ in range(2):  # Behind the first one it is decided.
        with pytest.raises(asyncckpt.IOFailedError, match="AccessDenied") as failed:
            asyncckpt.checkpoints.remove(url, 0)
        assert failed.value.errno == errno.EACCES
    assert asyncckpt.load(url).keys() == state(0).keys()


def test_marks_of_a_removal_whose_answers_are_lost(proxy: FaultProxy, url: str) -> None:
    for step in range(2):
        asyncckpt.save(url, state(step), step=step)
    proxy.fault = first("put", [FAULTS["500 after success"]] * 2, where="/manifests/.")
    assert asyncckpt.checkpoints.remove(url, [0]) is not None
    assert asyncckpt.list_steps(url) == [1]
    assert not [key for key in objects(url, "manifests") if "/." in key and "probe" not in key]


def test_nobody_builds_upon_what_a_late_request_may_remove(proxy: FaultProxy, url: str) -> None:
    """The decision to remove a step was not answered: it may come yet, and whoever opens the directory completes it."""
    asyncckpt.save(url, state(0), step=0)
    asyncckpt.save(url, state(0), step=1)
    proxy.fault = first("put", [Mishap(answer=(403, "AccessDenied")), FAULTS["silent"]], where="/manifests/.d-")
    with pytest.raises(asyncckpt.IOFailedError):
        asyncckpt.checkpoints.remove(url, [0])
    proxy.fault = lambda request: None
    assert [key for key in objects(url, "manifests") if "/.r-" in key]
    asyncckpt.checkpoints.remove(url, [0])
    assert not [key for key in objects(url, "manifests") if "/." in key and "probe" not in key]


def test_a_step_that_was_removed_does_not_hold_up_those_that_are_left(
    proxy: FaultProxy, url: str, tmp_path: Path
) -> None:
    saver, _ = open_saver(tmp_path / "ckpt", options(url))
    proxy.fault = lambda request: Mishap(answer=(403, "AccessDenied"))
    for step in range(4):
        saver.save(step)
    with pytest.raises(asyncckpt.IOFailedError):
        saver.wait_idle()
    asyncckpt.checkpoints.remove(tmp_path / "ckpt", [1])
    proxy.fault = lambda request: None
    saver.save_async(4).wait_uploaded()
    saver.close()
    assert asyncckpt.list_steps(url) == [0, 2, 3, 4]
    assert marks(tmp_path / "ckpt") == []


@pytest.mark.parametrize("how", ["removed", "being removed"])
def test_what_an_upload_builds_upon_may_be_removed_meanwhile(
    proxy: FaultProxy, url: str, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prune of the store cannot see what will need a step before its manifest is there."""
    table = asyncckpt.HashTable("t", 2)
    table.insert(torch.arange(9), torch.zeros(9, 2))
    left, store = [Mishap(answer=(403, "AccessDenied"))], ObjectStore(StoreUrl.of(url))

    def upload(root: Any, to: ObjectStore, name: str, wanted: Any) -> bool:
        is_new = real(root, to, name, wanted)
        if "000000000001" in name and is_new and left:
            left.clear()
            if how == "removed":
                remove_all(store, 0)
            else:
                store.put_new(f"manifests/.r-{'0' * 32}-{folder_of(store, 0)}", b"")
        return is_new

    with asyncckpt.Saver(
        path=tmp_path / "ckpt", tensors={}, hashtables={"t": table}, upload=options(url), deltas=asyncckpt.DeltaPolicy()
    ) as saver:
        saver.save_async(0).wait_uploaded()
        table.insert(torch.arange(9, 12), torch.ones(3, 2))
        real = upload_attempt._upload
        monkeypatch.setattr(upload_attempt, "_upload", upload)
        future = saver.save_async(1)
        if how == "being removed":
            with pytest.raises(asyncckpt.DeadlineError):
                future.wait_uploaded(2)
            assert marks(tmp_path / "ckpt") == [1]
            [mark] = [name for name in store.names("manifests") if name.startswith(".r-")]
            store.remove(f"manifests/{mark}")
        future.wait_uploaded(60)
        assert left == []
    assert asyncckpt.Loader(url, {"t": asyncckpt.HashTable("t", 2)}).load().step == 1
    assert marks(tmp_path / "ckpt") == []


def folder_of(store: ObjectStore, step: int) -> str:
    return next(name for name in store.names("data") if name.startswith(f"{step:012}"))


def remove_all(store: ObjectStore, step: int) -> None:
    """What a removal by another process does."""
    for found in (*store.below(f"data/{folder_of(store, step)}"), *store.below("manifests")):
        if "data/" in found.key or f"{step:012}" in found.key:
            store.remove(found.key)


def lose_the_newest(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save two steps, of which the newer one is removed when a load has opened it."""
    for step in (1, 2):
        asyncckpt.save(url, state(step), step=step)
    real, store = run_load.load_open, ObjectStore(StoreUrl.of(url))

    def load_open(*arguments: Any) -> Any:
        for key in [key for folder in ("manifests", "data") for key in objects(url, folder)]:
            if f"{2:012}" in key:
                store.remove(key)
        return real(*arguments)

    monkeypatch.setattr(run_load, "load_open", load_open)


def test_a_load_of_the_newest_goes_on_where_retention_removes_it(
    owner: seaweed.Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_the_newest(url, monkeypatch)
    target = state(0)
    assert asyncckpt.Loader(url, tensors=target).load().step == 1
    assert is_equal(target, 1)


def test_a_load_that_is_not_strict_mixes_no_two_steps(
    owner: seaweed.Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_the_newest(url, monkeypatch)
    with pytest.raises(asyncckpt.NotFoundError):
        asyncckpt.Loader(url, tensors=state(0), strict=False).load()
