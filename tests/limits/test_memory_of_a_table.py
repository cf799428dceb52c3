"""What statistics() says of the memory of a table, and the formula of the page, beside the resident memory."""

from __future__ import annotations

import math

import pytest
import torch

import asyncckpt
from asyncckpt import optim
from bench.table_memory import DIM, measured

KEPT_BYTES = 64 << 20  # Of batches, by the allocator.
pytestmark = pytest.mark.any_core  # The ids of the twin are objects of Python.


def by_the_page(capacity: int, column_bytes: int) -> int:
    """The formula of docs/tables-in-detail.md."""
    slots_count: int = 2 ** math.ceil(math.log2(1.6 * capacity))
    return capacity * (column_bytes + 9) + 16 * slots_count


@pytest.mark.parametrize("rows_count", [2_000_000, pytest.param(20_000_000, marks=pytest.mark.slow)])
def test_a_table_takes_what_its_statistics_say(rows_count: int) -> None:
    found, kept = measured(rows_count), KEPT_BYTES / rows_count
    assert found.measured <= 1.25 * found.said + kept
    assert found.shrunk <= 1.25 * found.said_shrunk + kept
    assert found.growing <= 1.6
    assert found.said_shrunk == pytest.approx(by_the_page(rows_count, 4 * DIM + 4) / rows_count, rel=0.05)


@pytest.mark.parametrize("rows_count", [100_000, 900_000])
def test_the_page_tells_what_to_plan_with(rows_count: int) -> None:
    slots = optim.SparseAdam.optimizer_slots()
    table = asyncckpt.HashTable("table", DIM, optimizer_slots=slots, capacity=rows_count)
    said = by_the_page(rows_count, 3 * 4 * DIM)
    assert table.statistics().bytes == pytest.approx(said, rel=0.05)
    table.lookup(torch.arange(rows_count))
    assert table.statistics().growths_count == 0
    assert table.statistics().bytes == pytest.approx(said, rel=0.05)
