"""A forked child touches nothing of its parent's, however it ends: no files, sessions, sockets, threads or saves."""

from __future__ import annotations

from pathlib import Path

import pytest

import asyncckpt
from tests.ranks.processes import await_ranks, start_rank
from tests.shares import share_of

DEADLINE_S = 200.0


@pytest.mark.parametrize("kind", share_of(["alone", "files", "group"], "children"))
def test_a_child_leaves_everything_to_its_parent(tmp_path: Path, kind: str) -> None:
    """child_ends.py says what is in flight."""
    ranks_count = 1 if kind == "alone" else 2
    arguments = [(rank, ranks_count, tmp_path, kind) for rank in range(ranks_count)]
    ranks = [start_rank("tests.interrupts.child_ends", given, tmp_path) for given in arguments]
    ended = await_ranks(ranks, DEADLINE_S)
    assert [rank.status for rank in ended] == [0] * ranks_count, "\n".join(rank.output for rank in ended)
    assert asyncckpt.list_steps(tmp_path / "run") == list(range(8)), "a save beside children failed"
    asyncckpt.verify(tmp_path / "run", 0)
    assert list((tmp_path / "run").glob("ranks/s-*")) == [], "the parent has ended its session"
