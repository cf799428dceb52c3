"""How much readers of another number of ranks read from a store, beside what they need: docs/object-stores.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.storage.object_store import ObjectStore
from tests.cloud import seaweed

SAVERS = 8
IDS_COUNT, SLICES = 1 << 14, 65536
ROWS, COLUMNS = 409_600, 64  # 100 MiB: the eighth of a rank is three leaves of 4 MiB and a half one.
Part = tuple[dict[str, asyncckpt.HashTable], dict[str, Any], Callable[[], int]]


def boxes(rank: int, count: int, *, is_filled: bool) -> Part:
    """Rows of one tensor."""
    begin, end = ROWS * rank // count, ROWS * (rank + 1) // count
    tensor = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)[begin:end].clone()
    if not is_filled:
        tensor.zero_()
    return {}, {"w": asyncckpt.sharded(tensor, (begin, 0), (ROWS, COLUMNS))}, lambda: tensor.nbytes


def table_of(shard: Any, *, is_filled: bool) -> Part:
    table = asyncckpt.HashTable("t", COLUMNS, shard=shard, capacity=IDS_COUNT)
    if is_filled:
        ids = torch.arange(IDS_COUNT) * (SLICES // IDS_COUNT)
        ids = ids[table.owns(ids)]
        table.insert(ids, ids[:, None].float().expand(-1, COLUMNS).contiguous())
    return {"t": table}, {}, lambda: len(table) * (8 + 4 * COLUMNS)


def slices(rank: int, count: int, *, is_filled: bool) -> Part:
    """Ranges of slices of the ids."""
    return table_of((SLICES * rank // count, SLICES * (rank + 1) // count, SLICES), is_filled=is_filled)


def modulo(rank: int, count: int, *, is_filled: bool) -> Part:
    return table_of((rank, count), is_filled=is_filled)


# Digests are of leaves, so who wants a part of one reads all of it. Rows of a table are in its order, not in that of
# their shards: who wants some of a file reads all of it.
CASES = [
    *((kind, 1, verify, 1.1) for kind in (boxes, slices, modulo) for verify in (True, False)),
    (boxes, 3, False, 1.1),
    (boxes, 3, True, 1.1),
    (slices, 3, True, 1.3),
    (modulo, 3, True, 3.1),
]


@pytest.mark.parametrize(("part_of", "readers", "verify", "share_max"), CASES)
def test_readers_read_little_more_than_they_need(
    owner: seaweed.Server,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    part_of: Callable[..., Part],
    readers: int,
    verify: bool,
    share_max: float,
) -> None:
    for rank in range(SAVERS):
        tables, tensors, _ = part_of(rank, SAVERS, is_filled=True)
        with asyncckpt.Saver(
            rank, SAVERS, SAVERS, url, tables, tensors, ranks=asyncckpt.RankOptions(in_turn=True)
        ) as saver:
            saver.save(0)
    read, plain = [], ObjectStore.read

    def counted(self: ObjectStore, key: str, *, begin: int, bytes: int, **more: Any) -> Any:
        raw, size = plain(self, key, begin=begin, bytes=bytes, **more)
        read.append(len(raw))
        return raw, size

    monkeypatch.setattr(ObjectStore, "read", counted)
    needed = 0
    for rank in range(readers):
        tables, tensors, bytes = part_of(rank, readers, is_filled=False)
        asyncckpt.Loader(url, tables, tensors, verify=verify).load()
        needed += bytes()
    assert needed <= sum(read) <= share_max * needed, sum(read) / needed
