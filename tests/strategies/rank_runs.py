"""Run the ranks of a test in processes of their own."""

from __future__ import annotations

from pathlib import Path

from tests.ranks.processes import await_ranks, start_rank

DEADLINE_S = 240


def run_ranks(module: str, ranks_count: int, store: Path, folder: Path) -> None:
    """Run `python -m tests.strategies.<module> <rank> <ranks_count> <store> <folder>` for every rank, to its end."""
    words = [(rank, ranks_count, store, folder) for rank in range(ranks_count)]
    ended = await_ranks([start_rank(f"tests.strategies.{module}", one, store.parent) for one in words], DEADLINE_S)
    outputs = [rank.output for rank in ended]
    assert [rank.status for rank in ended] == [0] * ranks_count, "\n".join(outputs)
    assert all(output.endswith("done\n") for output in outputs), outputs
