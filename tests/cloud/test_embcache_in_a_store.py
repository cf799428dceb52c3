"""Multi-level tables of one rank, or of ranks in turn, are saved to a store and loaded from it."""

from __future__ import annotations

from typing import Any

import pytest

import asyncckpt
from asyncckpt.embcache import PathRules, Saver
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.storage.object_store import ObjectStore
from tests.cloud import seaweed
from tests.embcache.models import CachedNet, image, union

STORES = PathRules(remote_file_systems=())


def loaded(url: str, *, world_size: int = 1, step: int | None = None) -> Any:
    images = []
    for rank in range(world_size):
        net = CachedNet(shard=(rank, world_size))
        with Saver(rank=rank, world_size=world_size, path_rules=STORES) as saver:
            report = saver.load(net, url, step=step)
        assert (str(report.path), report.layout) == (url, "asyncckpt")
        images.append(image(net))
    return union(images)


def test_one_rank_saves_deltas_and_loads(owner: seaweed.Server, url: str) -> None:
    net = CachedNet().trained(range(4))
    with Saver(rank=0, path_rules=STORES, keep=2) as saver:
        assert saver.save(net, url).step == 0
        net.trained(range(4, 8))
        expected = image(net)
        future = saver.save_async(net, url, kind="delta")
        net.trained(range(8, 12))
        assert future.result().step == 1
        saver.wait_idle()
    assert asyncckpt.list_steps(url) == [0, 1]
    assert loaded(url) == expected
    assert loaded(url, step=0) == image(CachedNet().trained(range(4)))


@pytest.mark.parametrize("readers", [1, 3])
def test_ranks_in_turn(owner: seaweed.Server, url: str, readers: int) -> None:
    nets = [CachedNet(shard=(rank, 2)).trained(range(6)) for rank in range(2)]
    for rank, net in enumerate(nets):
        with Saver(rank=rank, world_size=2, path_rules=STORES, in_turn=True) as saver:
            saver.save(net, url)
    assert asyncckpt.list_steps(url) == [0]
    assert loaded(url, world_size=readers) == union(map(image, nets))


def test_what_the_rules_refuse_and_what_is_not_there(owner: seaweed.Server, url: str) -> None:
    net = CachedNet().trained(range(2))
    before = image(net)
    with Saver(rank=0) as saver:
        for call in (saver.save, saver.load):
            with pytest.raises(asyncckpt.UsageError, match="is not on a local file system"):
                call(net, url)
    with Saver(rank=0, path_rules=STORES) as saver:
        with pytest.raises(asyncckpt.UsageError, match="holds a sensitive word"):
            saver.save(net, f"{url}/my_keys")
        with pytest.raises(asyncckpt.NotFoundError, match=r"no step in .* is complete"):
            saver.load(net, url)
    alone = pytest.raises(asyncckpt.UnsupportedError, match="by files need a directory on a disk")
    with Saver(rank=0, world_size=2, path_rules=STORES) as saver, alone:
        saver.save(CachedNet(shard=(0, 2)), url)
    assert image(net) == before
    assert not ObjectStore(StoreUrl.of(url)).below("")
