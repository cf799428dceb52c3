"""Regions stay as long as all rows fit, and tables that grow get most of the room."""

from __future__ import annotations

import itertools

import torch

from asyncckpt.model.table import Column, Role, TableSchema
from asyncckpt.native import PAGE_BYTES
from asyncckpt.plan.regions import RegionCache, Regions, RegionWish, column_row_bytes, plan_regions

SCHEMA = TableSchema(
    columns=(
        Column(name="id", dtype=torch.int64, row_shape=(), role=Role.ID),
        Column(name="embedding", dtype=torch.float32, row_shape=(16,), role=Role.WEIGHT),
        Column(name="seen", dtype=torch.int8, row_shape=(), role=Role.METADATA),
    )
)


def wish(rows_count: int, *, table: int = 0, name: str = "user", removed_count: int = 0) -> RegionWish:
    return RegionWish(table=table, name=name, schema=SCHEMA, rows_count=rows_count, removed_count=removed_count)


def check_apart(regions: Regions) -> None:
    """Every column begins on a page, and none reaches into another one."""
    spans = []
    for table in regions.tables:
        spans += [(c.offset, c.offset + table.rows_max * c.row_bytes) for c in table.columns.values()]
    spans.sort()
    assert all(begin % PAGE_BYTES == 0 for begin, _ in spans)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= regions.bytes


def test_row_bytes_are_those_that_are_stored() -> None:
    assert column_row_bytes(SCHEMA) == {"id": 8, "embedding": 64, "seen": 1}


def test_columns_lie_apart_on_pages() -> None:
    check_apart(plan_regions([wish(1000), wish(3, table=1, name="item"), wish(0, table=2, name="empty")]))


def test_removed_ids_have_room_of_their_own() -> None:
    regions = plan_regions([wish(10, removed_count=700), wish(5, table=1, name="item")])
    removed = regions.tables[0].removed
    assert removed is not None
    last = regions.tables[0].columns["seen"]
    assert removed.offset >= last.offset + 10
    assert regions.tables[1].columns["id"].offset >= removed.offset + 700 * 8
    assert regions.tables[1].removed is None


def test_regions_are_kept_while_rows_fit() -> None:
    cache = RegionCache()
    first = cache.regions([wish(100_000)])
    assert first.tables[0].rows_max > 100_000
    assert cache.regions([wish(first.tables[0].rows_max)]) is first
    assert cache.regions([wish(5)]) is first
    grown = cache.regions([wish(first.tables[0].rows_max + 1)])
    assert grown is not first
    check_apart(grown)


def test_another_name_or_schema_gets_other_regions() -> None:
    cache = RegionCache()
    first = cache.regions([wish(1000)])
    assert cache.regions([wish(1000, name="item")]) is not first
    assert cache.regions([wish(1000)]) is first


def test_the_table_that_grew_gets_most_of_the_room() -> None:
    cache = RegionCache()

    def room(regions: Regions, rows: list[int]) -> list[int]:
        return [table.rows_max - count for table, count in zip(regions.tables, rows, strict=True)]

    still, growing = wish(100_000), wish(100_000, table=1, name="item")
    before = room(cache.regions([still, growing]), [100_000, 100_000])
    assert before[0] == before[1]
    rows = 100_000 + before[1] + 1
    after = room(cache.regions([still, wish(rows, table=1, name="item")]), [100_000, rows])
    assert after[1] > 3 * after[0]
