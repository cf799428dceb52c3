"""Deltas of several ranks: loading, compacting and following them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asyncckpt
from tests.chains.model import Rows, layer_of, new_table
from tests.chains.written import Layer, Written, write
from tests.end_to_end.merged_ranks import merge
from tests.end_to_end.ranks_world import Target, TrainedRanks, owned, row
from tests.worlds.rows import rows_of


@pytest.mark.parametrize("ranks_count", [2, 3])
def test_deltas_and_compaction_of_several_ranks(tmp_path: Path, ranks_count: int) -> None:
    with TrainedRanks(tmp_path, ranks_count) as ranks:
        for step in (1, 2, 3, 4):
            ranks.save(step)
            for after in (1, ranks_count, 4):
                for rank in range(after):
                    target = Target(rank, after)
                    target.load(ranks.root)
                    target.check(ranks.rows)
        assert asyncckpt.describe(ranks.root).kind == "delta"
        result = asyncckpt.compact(ranks.root)
        assert not result.skipped
        asyncckpt.verify(ranks.root)
        compacted = asyncckpt.describe(ranks.root)
        assert (compacted.kind, compacted.compacted, compacted.ranks_count) == ("full", True, ranks_count)
        assert compacted.tables == {"user": len(ranks.rows)}
        for rank in compacted.ranks:
            assert rank.tables == {"user": len(owned(ranks.rows, rank.rank, ranks_count))}
            assert all(f"/r{rank.rank:05d}-" in file for file in rank.files)
        for after in (ranks_count, 5):
            for rank in range(after):
                target = Target(rank, after)
                report = target.load(ranks.root)
                target.check(ranks.rows)
                assert report.values["rank"] == (rank if after == ranks_count else 0)
        ranks.save(5)
        target = Target(0, 1)
        target.load(ranks.root)  # On top of the compacted one.
        target.check(ranks.rows)
        assert asyncckpt.verify(ranks.root).steps == (5, 4)


async def test_a_follower_of_several_ranks(tmp_path: Path) -> None:
    with TrainedRanks(tmp_path, 3, seed=5) as ranks:
        for step in (1, 2, 3):
            ranks.save(step)
        target = Target(0, 1)
        rows: Rows = {}
        kinds = []
        async for update in asyncckpt.follow(ranks.root, until=3, poll_seconds=0.01):
            kinds.append((update.kind, update.tables["user"].whole))
            changed, removed = await update.rows("user"), await update.removed("user")
            rows = (
                {}
                if update.tables["user"].whole
                else {id: r for id, r in rows.items() if id not in set(removed.tolist())}
            )
            values = torch.cat([changed["embedding"], changed["sum"][:, None]], dim=1).tolist()
            rows |= {id: tuple(value) for id, value in zip(changed["id"].tolist(), values, strict=True)}
            report = await update.load({"user": target.table}, target.state)
            assert rows_of(target.table) == rows
            assert report.values == {"rank": 0, "epoch": 3}
        assert kinds == [("full", True), ("delta", False), ("delta", False)]
        target.check(ranks.rows)


async def test_a_follower_of_shards_that_begin_anew_or_end(tmp_path: Path) -> None:
    """Where the shard of one rank is whole, or gone, nobody can tell what to remove: then the table is whole."""
    layers: list[list[dict[str, Layer]]] = [
        [{"user": layer_of({0: row(0), 2: row(2)})}, {"user": layer_of({1: row(1), 3: row(3)})}],
        [{"user": layer_of({2: row(2, 2)}, removed=(0,))}, {"user": layer_of({3: row(3, 2)}, whole=True)}],
        [{"user": layer_of({2: row(2, 3)})}, {}],
        [{"user": layer_of({4: row(4)})}, {}],
    ]
    expected = [
        (True, {id: row(id) for id in range(4)}),
        (True, {2: row(2, 2), 3: row(3, 2)}),
        (True, {2: row(2, 3)}),
        (False, {2: row(2, 3), 4: row(4)}),
    ]
    (tmp_path / "all").mkdir()
    own: list[Written | None] = [None, None]
    merged = None
    for step, of_ranks in enumerate(layers, 1):
        for rank, tables in enumerate(of_ranks):
            below = own[rank]
            own[rank] = write(tmp_path / f"{rank}", step, tables, parents=below.chain if below else ())
        merged = merge(tmp_path / "all", step, [tmp_path / "0", tmp_path / "1"], parent=merged)
    table = new_table()
    found = []
    async for update in asyncckpt.follow(tmp_path / "all", until=len(layers), poll_seconds=0.01):
        await update.load({"user": table})
        found.append((update.tables["user"].whole, rows_of(table)))
    assert found == expected
