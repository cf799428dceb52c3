"""Tables of FBGEMM on the device, where it is installed: plain ones, unified memory, and the cache over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from tests.gpu.device import DEVICE, keep_busy

pytestmark = pytest.mark.cuda_only
ROWS, DIM, WAIT_S = 1000, 16, 120


def make(location: str) -> Any:
    tbe = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    module = tbe.SplitTableBatchedEmbeddingBagsCodegen(
        embedding_specs=[
            (ROWS, DIM, getattr(common.EmbeddingLocation, location), tbe.ComputeDevice.CUDA),
            (ROWS // 2, DIM, getattr(common.EmbeddingLocation, location), tbe.ComputeDevice.CUDA),
        ],
        cache_load_factor=0.3,
        learning_rate=0.1,
        device=torch.device(DEVICE),
    )
    module.init_embedding_weights_uniform(-0.5, 0.5)
    return module


def train(module: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.randint(0, rows, (64,), generator=generator) for rows in (ROWS, ROWS // 2)]).to(DEVICE)
    offsets = torch.arange(0, 129, device=DEVICE)
    module(indices=ids, offsets=offsets).sum().backward()


def weights(module: Any) -> list[torch.Tensor]:
    module.flush()
    return [weight.detach().cpu().clone() for weight in module.split_embedding_weights()]


@pytest.mark.parametrize("location", ["DEVICE", "MANAGED", "MANAGED_CACHING"])
def test_a_save_beside_training(tmp_path: Path, location: str) -> None:
    module, twin = make(location), make(location)
    for other, weight in zip(twin.split_embedding_weights(), weights(module), strict=True):
        other.copy_(weight)
    for seed in range(5):
        train(module, seed)
        train(twin, seed)
    with asyncckpt.Saver(path=tmp_path, hashtables=module) as saver:
        keep_busy()
        train(module, 5)
        train(twin, 5)
        future = saver.save_async(1)
        train(module, 6)
        future.result(WAIT_S)
    found = make(location)
    asyncckpt.Loader(tmp_path, found).load()
    for one, other in zip(weights(found), weights(twin), strict=True):
        assert torch.equal(one, other)
