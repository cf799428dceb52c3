"""Channels between the ranks of process groups of torch.distributed, in processes of their own."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.ranks.processes import await_ranks, free_port, start_rank

pytestmark = pytest.mark.any_core

RUN_S_MAX = 120.0


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_channels_of_process_groups(tmp_path: Path, store: str) -> None:
    place = "tcp" if store == "tcp" else str(tmp_path / "store")
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if store == "tcp" else {}
    ranks = [start_rank("tests.ranks.group_process", (rank, place), tmp_path, **master) for rank in range(3)]
    ended = await_ranks(ranks, RUN_S_MAX)
    said = "\n".join(rank.output[-4000:] for rank in ended)
    assert [rank.status for rank in ended] == [-signal.SIGKILL, 0, 0], said
    assert all("done" in rank.output for rank in ended), said
