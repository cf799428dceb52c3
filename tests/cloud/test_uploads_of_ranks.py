"""Rank 0 uploads for all ranks, and none of them says that a checkpoint is in the store before it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asyncckpt
from tests.cloud.fault_proxy import FaultProxy, Mishap, Request
from tests.cloud.seaweed import Server
from tests.ranks.processes import Ended, await_ranks, outputs, start_rank

RANKS_COUNT = 2
STEPS = [0, 1, 2]


def run_ranks(folder: Path, *urls: str) -> list[Ended]:
    arguments = [(rank, RANKS_COUNT, folder, url) for rank, url in enumerate(urls)]
    return await_ranks([start_rank("tests.cloud.uploading_rank", given, folder) for given in arguments], 120.0)


@pytest.mark.parametrize("refusals", [0, 3])
def test_what_a_rank_has_waited_for_is_in_the_store(proxy: FaultProxy, url: str, tmp_path: Path, refusals: int) -> None:
    left = [Mishap(answer=(503, "SlowDown"))] * refusals

    def refuse(request: Request) -> Mishap | None:
        return left.pop() if left and request.kind == "put" and ".probe" not in request.path else None

    proxy.fault = refuse
    ended = run_ranks(tmp_path, url, url)
    assert [rank.status for rank in ended] == [0, 0], outputs(ended)
    assert left == []
    assert asyncckpt.list_steps(url) == STEPS
    for step in STEPS:
        asyncckpt.verify(url, step)
        table = asyncckpt.HashTable("t", 2)
        tensors = {"own.0": torch.zeros(1), "own.1": torch.zeros(1), "both": torch.zeros(4)}
        asyncckpt.Loader(url, {"t": table}, tensors, step=step).load()
        assert [tensors[f"own.{rank}"].item() for rank in range(RANKS_COUNT)] == [step, step + 100]
        assert torch.equal(tensors["both"], torch.full((4,), float(step)))
        ids = torch.arange(20)
        assert torch.equal(table.embedding[table.lookup(ids, insert=False)][:, 0], ids + 100.0 * step)


def test_a_rank_is_not_told_of_an_upload_that_rank_0_does_not_make(owner: Server, url: str, tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, "", url)
    assert ended[1].status == 1
    assert "AttemptGoneError: step 0" in ended[1].output, outputs(ended)
    assert "without `upload`" in ended[1].output


def test_a_store_that_rank_0_cannot_use_ends_all_constructors(owner: Server, tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, *["s3://no-such-bucket/run"] * RANKS_COUNT)
    assert [rank.status for rank in ended] == [1, 1], outputs(ended)
    assert "NoSuchBucket" in ended[0].output
    assert "PeerError" in ended[1].output
    assert "NoSuchBucket" in ended[1].output, "it says why"
