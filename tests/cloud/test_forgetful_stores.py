"""A store that answers a PUT with success and keeps nothing: nothing of that is acknowledged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asyncckpt
import asyncckpt.checkpoints
from tests.cloud.fault_proxy import FaultProxy, Mishap, first
from tests.cloud.test_uploads import marks


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_manifest_that_was_not_kept_is_in_doubt(proxy: FaultProxy, url: str, is_asked: bool) -> None:
    x = torch.zeros(3)
    with asyncckpt.Saver(path=url, tensors={"x": x}) as saver:
        saver.save(0)
        proxy.fault = first("put", [Mishap(forgotten=True)], where="/manifests/")
        with pytest.raises(asyncckpt.IndeterminateError, match="was made, and is not there") as caught:
            saver.save_async(1).result()
        assert asyncckpt.list_steps(url) == [0]
        if is_asked:
            assert not caught.value.resolve()
        x.fill_(2)
        saver.save_async(2).result()
    assert asyncckpt.list_steps(url) == ([0, 2] if is_asked else [0, 1, 2])
    assert [float(asyncckpt.load(url, step=step)["x"][0]) for step in (0, 2)] == [0, 2]


def test_what_is_forgotten_again_and_again_stays_in_doubt(proxy: FaultProxy, url: str) -> None:
    with asyncckpt.Saver(path=url, tensors={"x": torch.zeros(3)}) as saver:
        proxy.fault = first("put", [Mishap(forgotten=True)] * 3, where="/manifests/")
        for step in range(3):
            with pytest.raises(asyncckpt.IndeterminateError):
                saver.save_async(step).result()
        saver.save_async(3).result()
    assert asyncckpt.list_steps(url) == [0, 3]


def test_a_file_that_was_not_kept_fails_the_save(proxy: FaultProxy, url: str) -> None:
    with asyncckpt.Saver(path=url, tensors={"x": torch.zeros(3)}) as saver:
        proxy.fault = first("put", [Mishap(forgotten=True)], where="/data/")
        with pytest.raises(asyncckpt.CorruptError, match="is missing"):
            saver.save_async(0).result()
        saver.save_async(1).result()
    assert asyncckpt.list_steps(url) == [1]


@pytest.mark.parametrize("where", ["/data/", "/manifests/"])
def test_an_upload_that_was_not_kept_keeps_its_step(proxy: FaultProxy, url: str, tmp_path: Path, where: str) -> None:
    """Retention would remove what is on the disk, when it is uploaded."""
    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.zeros(3)}, upload=url, keep=1) as saver:
        proxy.fault = first("put", [Mishap(forgotten=True)], where=where)
        with pytest.raises(asyncckpt.CheckpointError, match="is not there"):
            saver.save_async(0).wait_uploaded()
        assert marks(tmp_path) == [0]
        saver.save_async(1).wait_uploaded()
        saver.wait_idle()
        assert asyncckpt.list_steps(url) == [0, 1]


def test_a_pin_that_was_not_kept_is_none(proxy: FaultProxy, url: str) -> None:
    with asyncckpt.Saver(path=url, tensors={"x": torch.zeros(3)}) as saver:
        saver.save(0)
    proxy.fault = first("put", [Mishap(forgotten=True)], where=".pin")
    with pytest.raises(asyncckpt.IOFailedError, match="was made, and is not there"):
        asyncckpt.checkpoints.pin(url, 0)
    assert asyncckpt.checkpoints.pinned_steps(url) == []
    asyncckpt.checkpoints.pin(url, 0)
    assert asyncckpt.checkpoints.pinned_steps(url) == [0]


@pytest.mark.parametrize("mark", ["/.r-", "/.d-"])
def test_nothing_is_removed_whose_removal_nobody_can_see(proxy: FaultProxy, url: str, mark: str) -> None:
    with asyncckpt.Saver(path=url, tensors={"x": torch.zeros(3)}) as saver:
        saver.save(0)
        saver.save(1)
    proxy.fault = first("put", [Mishap(forgotten=True)], where=mark)
    with pytest.raises(asyncckpt.IOFailedError, match="was made, and is not there"):
        asyncckpt.checkpoints.remove(url, [0])
    assert asyncckpt.list_steps(url) == [0, 1]
    asyncckpt.verify(url, 0)
    asyncckpt.checkpoints.remove(url, [0])
    assert asyncckpt.list_steps(url) == [1]
