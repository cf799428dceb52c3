"""Ranks of jobs that save multi-level tables, each a function of (rank, folder, ...) that checks what this rank sees.

Run by test_several_ranks.py.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt.coordination.store_channel import StoreChannel
from asyncckpt.embcache import EmbCacheShardedEmbeddingBagCollection, Saver
from tests.embcache.earlier_form import save_rank
from tests.embcache.models import CachedNet, config, image

WORLD = 2
DEADLINE_S = 60.0


def group_of(rank: int, folder: Path, *, store: str = "store") -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{store}", rank=rank, world_size=WORLD)


def raised(kind: type[BaseException], text: str, call: Any, *args: Any, **options: Any) -> Any:
    with pytest.raises(kind, match=re.escape(text)) as caught:
        call(*args, **options)
    return caught.value


def saves_and_loads(rank: int, folder: Path) -> None:
    """One commit of both ranks for every save, blocking or not; deltas; only the newest two are kept."""
    group_of(rank, folder)
    path = folder / "sparse"
    collection = EmbCacheShardedEmbeddingBagCollection([config()])
    assert collection.tables()["user"].shard == (rank, WORLD)
    raised(asyncckpt.UsageError, "not that of torch.distributed", Saver, rank=rank + 1)
    raised(asyncckpt.UsageError, "not that of torch.distributed", Saver, world_size=1)
    policy = asyncckpt.DeltaPolicy(deltas_max=100, bytes_share_max=1000.0)
    with Saver(peers_deadline=DEADLINE_S, deltas=policy, keep=2) as saver:
        assert (saver.rank, saver.world_size) == (rank, WORLD)
        net = CachedNet(shard=(rank, WORLD)).trained(range(3))
        assert saver.save(net, path).step == 0
        first = image(net)
        net.trained(range(3, 6))
        cut = image(net)
        future = saver.save_async(net, path)
        net.trained(range(6, 12))
        result = future.result(DEADLINE_S)
        assert (result.step, result.kind) == (1, "delta")
        fresh = CachedNet(shard=(rank, WORLD))
        report = saver.load(fresh, path)
        assert image(fresh) == cut
        assert (report.step, report.world_size, report.passed_over) == (1, WORLD, ())
        assert image(fresh.trained(range(6, 12))) == image(net)
        saver.load(fresh, path, step=0)
        assert image(fresh) == first
        assert saver.save(net, path, step=20, kind="full").step == 20
        assert saver.save(net, path).step == 21
        saver.load(fresh, path)
        assert image(fresh) == image(net)
        assert saver.save(net, folder / "other").step == 0  # A second directory, over the same channel.
        other = CachedNet(shard=(rank, WORLD)).trained(range(2))
        future = saver.save_async(other, path)  # Another module opens the directory anew.
        dist.barrier()
        dist.destroy_process_group()
        group_of(rank, folder, store="store-of-another-group")
        assert saver.save(other, path, step=30).step == 30
        assert future.result(DEADLINE_S).step == 22
        assert saver.load(fresh, path).step == 30
        assert image(fresh) == image(other)
    with Saver(peers_deadline=DEADLINE_S) as again:
        assert again.save(net, path).step == 31


def errors_of_one_rank(rank: int, folder: Path) -> None:
    """What goes wrong on one rank is told to the other, and nothing is saved or changed; the next call works."""
    group_of(rank, folder)
    path = folder / "sparse"
    net = CachedNet(shard=(rank, WORLD)).trained(range(3))
    bad = path / "password" if rank == 1 else path
    with Saver(peers_deadline=DEADLINE_S) as saver:
        for _ in range(2):  # Before the directory is open, and after.
            for call in (saver.save, lambda *given: saver.save_async(*given).result(DEADLINE_S)):
                if rank == 1:
                    raised(asyncckpt.UsageError, "sensitive word", call, net, bad)
                else:
                    error = raised(asyncckpt.PeerError, "because of rank 1", call, net, bad)
                    assert "sensitive word" in error.cause
            assert saver.save(net, path).kind == "full"
        for elsewhere in (path, folder / "unopened"):  # Rank 0 is the one that others wait for.
            bad = elsewhere / "password" if rank == 0 else elsewhere
            if rank == 0:
                raised(asyncckpt.UsageError, "sensitive word", saver.save, net, bad)
            else:
                assert "sensitive word" in raised(asyncckpt.PeerError, "rank 0", saver.save, net, bad).cause
        bad = path / "password" if rank == 1 else path
        before = image(net)
        if rank == 1:
            raised(asyncckpt.UsageError, "sensitive word", saver.load, net, bad)
            double = CachedNet(shard=(rank, WORLD), dtype=torch.float64)
            raised(asyncckpt.IncompatibleError, "dtype", saver.load, double, path)
        else:
            raised(asyncckpt.PeerError, "the load failed on rank 1: UsageError", saver.load, net, bad)
            raised(asyncckpt.PeerError, "the load failed on rank 1: Incompatible", saver.load, net, path)
        assert image(net) == before
        raised(asyncckpt.PeerError, "it has step", saver.load, net, path, step=rank)
        assert image(net) == before
        raised(asyncckpt.ConflictError, "aborted on all ranks", saver.save, net, path, step=10 + rank)
        assert saver.save(net, path).step == 2
        assert saver.save(net, folder / "unopened").step == 0
    dist.barrier()
    with Saver(peers_deadline=2.0) as impatient:
        assert impatient.save(net, path).step == 3
        if rank == 0:
            raised(asyncckpt.PeerError, "rank 1", impatient.save, net, path)


def by_files(rank: int, folder: Path) -> None:
    """Without torch.distributed the ranks find each other in the directory."""
    torch.set_num_threads(1)
    net = CachedNet(shard=(rank, WORLD), admit_after=2).trained(range(3))
    given = {"world_size": WORLD} if rank == 0 else {}  # Or the tables say it.
    with Saver(rank=rank, peers_deadline=DEADLINE_S, **given) as saver:
        assert saver.world_size == given.get("world_size")
        assert saver.save(net, folder / "sparse").step == 0
        net.trained(range(3, 6))
        if rank == 1:
            wrong = CachedNet(shard=(0, WORLD))
            raised(asyncckpt.UsageError, "does not belong", saver.save, wrong, folder / "sparse")
        else:
            raised(asyncckpt.PeerError, "because of rank 1", saver.save, net, folder / "sparse")
        assert saver.save_async(net, folder / "sparse").result(DEADLINE_S).step == 1


def dies(rank: int, folder: Path, victim: int, sends_count: int) -> None:
    """In the second save a rank dies instead of sending its message number `sends_count`."""
    group_of(rank, folder)
    net = CachedNet(shard=(rank, WORLD)).trained(range(3))
    saver = Saver(peers_deadline=5.0)
    assert saver.save(net, folder / "sparse").step == 0
    dist.barrier()
    if rank == victim:
        numbers = iter(range(1, sends_count))
        send = StoreChannel.send

        def send_or_die(channel: Any, *given: Any) -> None:
            if next(numbers, None) is None:
                os._exit(9)
            send(channel, *given)

        StoreChannel.send = send_or_die  # type: ignore[method-assign]
    net.trained(range(3, 6))
    if (victim, sends_count) == (0, 2):  # Rank 1 is not told, and finds the manifest.
        assert saver.save(net, folder / "sparse").step == 1
    else:
        with pytest.raises(asyncckpt.PeerError):
            saver.save(net, folder / "sparse")
    os._exit(0)


def goes_on(rank: int, folder: Path) -> None:
    """A job that begins where the newest save is, whoever has written it."""
    group_of(rank, folder, store="store-of-another-group")
    net = CachedNet(shard=(rank, WORLD))
    with Saver(peers_deadline=DEADLINE_S) as saver:
        step = saver.load(net, folder / "sparse").step
        assert step is not None
        trained = CachedNet(shard=(rank, WORLD)).trained(range(3 * (step + 1)))
        assert image(net) == image(trained)
        assert saver.save(net.trained(range(3 * (step + 1), 9)), folder / "sparse").step == step + 1


def earlier_form(rank: int, folder: Path) -> None:
    """A directory in which an earlier job left one directory per rank."""
    group_of(rank, folder)
    path = folder / "sparse"
    net = CachedNet(shard=(rank, WORLD), admit_after=2).trained(range(3))
    save_rank(net, path, step=4, save_id="one")
    if rank == 1:
        save_rank(net, path, step=6, save_id="two")  # A crash before rank 0 committed.
    dist.barrier()
    fresh = CachedNet(shard=(rank, WORLD), admit_after=2)
    with Saver(peers_deadline=DEADLINE_S) as saver:
        report = saver.load(fresh, path)
        assert (report.step, report.world_size, report.passed_over) == (4, WORLD, (6,))
        assert image(fresh) == image(net)
        assert saver.save(net.trained(range(3, 5)), path).step == 7
        assert saver.load(fresh, path).step == 7
        assert image(fresh) == image(net)
