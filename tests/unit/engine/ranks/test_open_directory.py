"""A directory that could not be opened with the other ranks is not held."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncckpt.engine.ranks.open_directory import OwnShard, _ranks_over, open_directory
from asyncckpt.errors import IOFailedError
from asyncckpt.options import RankOptions
from bench.memory_channel import MemoryExchange

pytestmark = pytest.mark.any_core


def test_rank_0_gives_the_directory_back_when_the_others_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(call: int, name: str, data: bytes) -> None:
        raise IOFailedError("the channel of rank 0 is gone")

    channel = MemoryExchange(2).channel(0)
    monkeypatch.setattr(channel, "put", put)
    ranks = RankOptions(_ranks_over(channel, 1.0))
    with pytest.raises(IOFailedError, match="channel of rank 0"):
        open_directory(tmp_path, OwnShard(0, 2), options=ranks, exact_modes=False)
    open_directory(tmp_path, OwnShard(0, 1), options=RankOptions(), exact_modes=False).close()
