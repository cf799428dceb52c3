"""Small checkpoints of several files, one of them of several parts, and requests that end soon."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncckpt.commit import store_root
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.plan import image
from asyncckpt.storage import object_store
from asyncckpt.storage.object_store import ObjectStore

PART_BYTES = 5 << 20  # The least that S3 takes.
FILE_BYTES = 8 << 20


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small checkpoints have several files, one of them of several parts, and requests end soon."""
    monkeypatch.setattr(object_store, "PART_BYTES_MIN", PART_BYTES)
    monkeypatch.setattr(image, "FILE_TARGET_BYTES", FILE_BYTES)
    monkeypatch.setattr(store_root, "STORE_LIMITS", object_store.StoreLimits(request_s=2.0, retry_s=4.0))


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((3 << 20,), value), "bias": torch.full((1000,), value)}


def is_equal(loaded: dict[str, Any], value: float) -> bool:
    return all(torch.equal(loaded[name], tensor) for name, tensor in state(value).items())


def objects(url: str, folder: str = "data") -> set[str]:
    return keys(ObjectStore(StoreUrl.of(url)), folder)


def keys(store: ObjectStore, folder: str = "data") -> set[str]:
    return {found.key for found in store.below(folder)}
