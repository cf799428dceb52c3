"""Ranks that agree on who writes what they share, at different times; run by test_jobs.py."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

import asyncckpt
from tests.dcp.model import make, train
from tests.ranks.job_ranks import PEER_DEADLINE_S, WAIT_S_MAX, group_of


def one_rank_is_ahead(rank: int, folder: Path) -> None:
    """Rank 1 makes its second call while the first save, in which they ask who writes what, is in flight; rank 0 makes
    it after that. Whether the second save is queued or skipped, it and the third one are as good as any."""
    group_of(rank, 2, folder)
    for on_busy in ("queue", "skip"):
        state = {on_busy: torch.full((5000,), 3.0), f"of {rank}": torch.full((6000,), 4.0)}
        with asyncckpt.Saver(
            rank,
            2,
            path=folder / on_busy,
            tensors=state,
            on_busy=on_busy,
            ranks=asyncckpt.RankOptions(peer_deadline=PEER_DEADLINE_S),
        ) as saver:
            if rank == 1:
                futures = [saver.save_async(step) for step in (1, 2)]
            dist.barrier()
            if rank == 0:
                futures = []
                for step in (1, 2):
                    futures.append(saver.save_async(step))
                    futures[-1].result(WAIT_S_MAX)
            assert not futures[0].result(WAIT_S_MAX).skipped
            assert futures[1].result(WAIT_S_MAX).skipped == (on_busy == "skip")
            saver.wait_idle()
            assert saver.save(3).step == 3
        found = {on_busy: torch.zeros(5000), "of 0": torch.zeros(6000), "of 1": torch.zeros(6000)}
        for step in (1, 3) if on_busy == "skip" else (1, 2, 3):
            asyncckpt.Loader(folder / on_busy, tensors=found, step=step).load()
            assert [float(found[name].mean()) for name in sorted(found)] == [4.0, 4.0, 3.0]


def ranks_tie_different_ones(rank: int, folder: Path) -> None:
    """What one rank holds in one piece of memory and another apart is there under every name, whoever writes which."""
    group_of(rank, 3, folder)
    for order in ("abcd", "dcba"):
        weight = torch.full((5000,), 3.0)
        tied = {0: "ab", 1: "bcd", 2: ""}[rank]
        state = {name: weight.detach() if name in tied else weight.clone() for name in order}
        with asyncckpt.Saver(
            rank, 3, path=folder / order, tensors=state, ranks=asyncckpt.RankOptions(peer_deadline=PEER_DEADLINE_S)
        ) as saver:
            for step in (1, 2, 3):
                with torch.no_grad():
                    for tensor in state.values():
                        tensor.fill_(float(step))
                saver.save_async(step).result(WAIT_S_MAX)
                found = {name: torch.zeros(5000) for name in order}
                report = asyncckpt.Loader(folder / order, tensors=found, step=step).load()
                assert (report.missing, report.unexpected) == ((), ())
                assert [float(tensor.mean()) for tensor in found.values()] == [float(step)] * 4
                dist.barrier()
            state["a"] = torch.full((5001,), 3.0)  # Of new shapes, so that they are compared again.
            # On rank 1 there is another value under the name that rank 0 has tied.
            state["b"] = state["a"] if rank == 0 else torch.full((5001,), 9.0 if rank == 1 else 3.0)
            future = saver.save_async(4)
            error = future.exception(WAIT_S_MAX)
            assert isinstance(error, asyncckpt.ConflictError)
            assert "different values on ranks" in str(error), error
            dist.barrier()


def fsdp2_through_a_saver(rank: int, folder: Path) -> None:
    """A module of FSDP2 and its optimizer are saved by all ranks, and come back, sharded, and whole as a dict."""
    group_of(rank, 2, folder)
    model, optimizer = make(seed=1)
    train(model, optimizer)
    state = {"model": model, "optim": optimizer}
    options = asyncckpt.RankOptions(peer_deadline=PEER_DEADLINE_S)
    with asyncckpt.Saver(rank, 2, path=folder / "ckpt", tensors=state, ranks=options) as saver:
        saver.save_async(1).result(WAIT_S_MAX)
    other, another = make(seed=2)
    asyncckpt.Loader(folder / "ckpt", tensors={"model": other, "optim": another}).load()
    whole = asyncckpt.load(folder / "ckpt")["model"]
    assert list(whole) == list(model.state_dict())
    for (name, found), expected in zip(other.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(found.to_local(), expected.to_local())
        assert torch.equal(whole[name], expected.full_tensor())
    train(model, optimizer)
    train(other, another)
    for found, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(found.to_local(), expected.to_local()), "it goes on as it would have"
