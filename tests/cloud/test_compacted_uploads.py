"""A step may have two manifests in a store, its own and a compacted one: both of one history, or one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.commit.discover import read_head
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.engine.upload.upload_attempt import upload_attempt
from asyncckpt.format.names import Attempt
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.storage.object_store import ObjectStore
from tests.cloud import seaweed


def save_steps(path: Path, value: float, *, upload: str | None, compact: bool = False) -> None:
    """Save step 1, and step 2 as a delta on it, of value + 1 and value + 2; errors of uploads are not raised."""
    tensors = {"w": torch.zeros(1000)}
    saver = asyncckpt.Saver(path=path, tensors=tensors, upload=upload)
    for step in (1, 2):
        tensors["w"].fill_(value + step)
        saver.save(step, kind="full" if step == 1 else "delta")
    if compact:
        saver.compact(2).result()
    saver.wait_idle()
    saver.close()


def upload_step(path: Path, step: int, url: str) -> None:
    with CheckpointRoot.for_reading(path) as root:
        attempt = Attempt(step, read_head(root, step).attempt)
    upload_attempt(path, ObjectStore(StoreUrl.of(url)), attempt, asyncckpt.UploadOptions(url))


def manifests(url: str) -> list[str]:
    return sorted(name for name in ObjectStore(StoreUrl.of(url)).names("manifests") if name.endswith(".json"))


def test_a_compaction_stands_beside_the_manifest_that_it_replaces(
    owner: seaweed.Server, url: str, tmp_path: Path
) -> None:
    save_steps(tmp_path / "run", 0, upload=url, compact=True)
    upload_step(tmp_path / "run", 2, url)
    assert manifests(url) == ["000000000001.json", "000000000002.full.json", "000000000002.json"]
    assert asyncckpt.load(url, step=2)["w"][0] == 2


def test_a_compaction_of_other_data_does_not_come_to_stand_for_a_step(
    owner: seaweed.Server, url: str, tmp_path: Path
) -> None:
    save_steps(tmp_path / "first", 100, upload=url)
    save_steps(tmp_path / "second", 900, upload=None, compact=True)
    with pytest.raises(asyncckpt.ConflictError, match=r"000000000002\.json'.*another checkpoint"):
        upload_step(tmp_path / "second", 2, url)
    assert asyncckpt.load(url, step=2)["w"][0] == 102


def test_a_step_is_not_uploaded_beneath_a_compaction_of_other_data(
    owner: seaweed.Server, url: str, tmp_path: Path
) -> None:
    save_steps(tmp_path / "run", 0, upload=None, compact=True)
    upload_step(tmp_path / "run", 2, url)
    assert manifests(url) == ["000000000002.full.json"]
    asyncckpt.checkpoints.remove(tmp_path / "run", [2])
    saver = asyncckpt.Saver(path=tmp_path / "run", tensors={"w": torch.full((1000,), 77.0)}, upload=url)
    with saver, pytest.raises(asyncckpt.ConflictError, match=r"000000000002\.full\.json'.*another checkpoint"):
        saver.save_async(2, kind="full").wait_uploaded()
    assert asyncckpt.load(url, step=2)["w"][0] == 2
