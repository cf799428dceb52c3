"""A process whose Saver writes to a store is killed at any request: the store shows whole checkpoints alone."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator

import pytest

import asyncckpt
import asyncckpt.checkpoints
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.storage.object_store import ObjectStore
from tests.cloud.fault_proxy import FaultProxy
from tests.cloud.forked import Forks, save_steps, state
from tests.cloud.test_uploads_killed import Killer, forks, run_until_killed, steps_there

SEED = 31
KILLS_COUNT = 8
LANES_COUNT = 25
LAST = 3
REQUESTS_MAX = 90  # Of three steps, and of what they let go; a kill at a later one finds the process gone.

__all__ = ["forks"]


def folders(url: str) -> Iterator[int]:
    keys = {found.key.split("/")[1] for found in ObjectStore(StoreUrl.of(url)).below("data")}
    yield from sorted(int(key.partition("-")[0]) for key in keys)


# With the slow ones, 200 kills.
@pytest.mark.parametrize("lane", [0, *(pytest.param(lane, marks=pytest.mark.slow) for lane in range(1, LANES_COUNT))])
def test_a_kill_leaves_whole_checkpoints(forks: Forks, proxy: FaultProxy, url: str, lane: int) -> None:
    rng = random.Random(SEED + lane)
    killed_count = 0
    for run in range(KILLS_COUNT):
        place = f"{url}/run{run}"
        save_steps(place, "", 0, 0)
        killer = Killer(number=rng.randint(1, REQUESTS_MAX), is_done=rng.random() < 0.5)
        said, status = run_until_killed(forks, proxy, place, "", killer, last=LAST)
        killed_count += status == signal.SIGKILL
        assert status in (0, signal.SIGKILL)

        found = steps_there(place)
        assert found, "what was acknowledged goes behind what comes after it"
        assert found[-1] >= max(said, default=0)
        assert {*found} <= {*range(LAST + 1)}

        with asyncckpt.Saver(path=place, tensors=state(0), keep=1) as saver:
            step = saver.save().step
            saver.wait_idle()
        assert step == found[-1] + 1
        # What this process has loaded and found whole may stay beside the newest one.
        assert asyncckpt.list_steps(place) in ([step], [found[-1], step])
        asyncckpt.checkpoints.collect_garbage(place)
        assert [*folders(place)] == asyncckpt.list_steps(place)
        assert not [name for name in ObjectStore(StoreUrl.of(place)).names("manifests") if name[:3] in (".r-", ".d-")]
    assert killed_count > KILLS_COUNT // 3
