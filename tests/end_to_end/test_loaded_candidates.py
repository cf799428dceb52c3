"""What waits for its admission belongs to the rows of its table: a load and a removal leave none that do not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt

KINDS: dict[str, Any] = {
    "hash": lambda **options: asyncckpt.HashTable("t", 2, **options),
    "levels": lambda **options: asyncckpt.MultiLevelTable("t", 2, cache_rows=32, **options),
}


def table_of(kind: str, *, admit_after: int = 3, rows: tuple[int, ...] = (), waiting: tuple[int, ...] = ()) -> Any:
    table = KINDS[kind](admit_after=admit_after)
    ids = torch.tensor(rows, dtype=torch.int64)
    table.insert(ids, torch.ones(len(rows), 2))
    table.lookup(torch.tensor(waiting, dtype=torch.int64))
    return table


def waiting_in(table: Any) -> dict[int, int]:
    ids, counts = table.companions()["candidates"].counts()
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


def save(path: Path, table: Any) -> None:
    with asyncckpt.Saver(path=path, hashtables={"t": table}) as saver:
        saver.save(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_of_a_checkpoint_without_counts_leaves_none(tmp_path: Path, kind: str) -> None:
    save(tmp_path, table_of(kind, admit_after=1, rows=(0, 1)))
    table = table_of(kind, rows=(5,), waiting=(1, 8))
    report = asyncckpt.Loader(tmp_path, hashtables={"t": table}, strict=False).load()
    assert report.missing == ("t.candidates",)
    assert (sorted(table.ids().tolist()), waiting_in(table)) == ([0, 1], {})


@pytest.mark.parametrize("kind", KINDS)
def test_a_merge_leaves_counts_of_ids_without_a_row_alone(tmp_path: Path, kind: str) -> None:
    """Of the table's own, and of those that come with the rows."""
    save(tmp_path / "without", table_of(kind, admit_after=1, rows=(0, 1)))
    save(tmp_path / "with", table_of(kind, rows=(0, 1), waiting=(5, 9)))
    for name in ("without", "with"):
        table = table_of(kind, rows=(5, 6), waiting=(1, 8))
        options: Any = {"strict": False} if name == "without" else {}
        asyncckpt.Loader(tmp_path / name, hashtables={"t": table}, merge=True, **options).load()
        assert sorted(table.ids().tolist()) == [0, 1, 5, 6]
        assert waiting_in(table) == ({8: 1} if name == "without" else {8: 1, 9: 1})
        table.remove(torch.tensor([1]))
        assert table.lookup(torch.tensor([1])).tolist() == [-1], "it is counted from the beginning"


@pytest.mark.parametrize("kind", KINDS)
def test_a_removed_id_waits_no_more(tmp_path: Path, kind: str) -> None:
    table = table_of(kind, rows=(5,), waiting=(1, 8))
    assert table.remove(torch.tensor([[1, 5]])) == 1
    assert waiting_in(table) == {8: 1}
    save(tmp_path, table)
    found = asyncckpt.load(tmp_path, tables=True)
    assert (found["t"]["id"].tolist(), found["t.candidates"]["id"].tolist()) == ([], [8])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
async def test_a_follower_has_the_same_rows_and_counts(tmp_path: Path, kind: str, seed: int) -> None:
    """Ids come, wait, go and come again, between steps that are followed one by one or passed over."""
    chosen, trained, served = random.Random(seed), table_of(kind), table_of(kind, rows=(3,), waiting=(4,))
    print(f"seed {seed}")
    deltas = asyncckpt.DeltaPolicy(deltas_max=100, bytes_share_max=1e9)
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": trained}, deltas=deltas, durability="none") as saver:
        async with asyncckpt.follow(tmp_path, poll_seconds=0.005) as follower:
            for step in range(12):
                for _ in range(chosen.randrange(1, 5)):
                    ids = torch.tensor(chosen.sample(range(12), 4))
                    trained.lookup(ids)
                    if chosen.random() < 0.5:
                        trained.remove(ids[: chosen.randrange(3)])
                saver.save_async(step).result(60)
                update = await anext(follower)
                if chosen.random() < 0.7:
                    await update.load({"t": served})
                    assert sorted(served.ids().tolist()) == sorted(trained.ids().tolist())
                    assert waiting_in(served) == waiting_in(trained)
