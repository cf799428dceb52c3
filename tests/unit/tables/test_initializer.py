"""First rows: hashed ones depend on seed, id and column alone; faulty functions leave nothing behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.errors import UsageError
from asyncckpt.tables import HashTable, Uniform, initializer, row_store

INT64 = st.integers(-(2**63), 2**63 - 1)


def splitmix64(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


def reference(id: int, column: int, *, seed: int) -> float:
    key = splitmix64((id + splitmix64(seed % 2**64)) % 2**64)
    word = splitmix64((key + (column // 2 + 1) * 0x9E3779B97F4A7C15) % 2**64)
    half = word >> 32 if column % 2 else word % 2**32
    return (half >> 8) * 2.0**-23 - 1.0


@given(ids=st.lists(INT64, max_size=8), seed=INT64, dim=st.integers(1, 9))
def test_uniform_is_the_documented_hash(ids: list[int], seed: int, dim: int) -> None:
    rows = Uniform(1.0, seed=seed).rows(np.array(ids, dtype=np.int64), dim=dim)
    assert rows.dtype == np.float32
    assert rows.tolist() == [[reference(id, column, seed=seed) for column in range(dim)] for id in ids]


@pytest.mark.parametrize("dim", [1, 7, 64])
def test_uniform_does_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    ids = np.arange(-500, 500, dtype=np.int64)
    whole = Uniform(0.1).rows(ids, dim=dim)
    monkeypatch.setattr(initializer, "WORDS_PER_CHUNK", 100)
    monkeypatch.setattr(row_store, "INITIALIZER_ROWS_MAX", 64)
    table = HashTable("user", dim, initializer=Uniform(0.1))
    shuffled = torch.from_numpy(ids)[torch.randperm(1000, generator=torch.Generator().manual_seed(1))]
    table.lookup(shuffled)
    assert np.array_equal(table.embedding[table.lookup(ids)].numpy(), whole)


def test_uniform_is_even_and_bounded() -> None:
    rows = Uniform(0.05, seed=3).rows(np.arange(20_000, dtype=np.int64), dim=16)
    assert np.abs(rows).max() <= np.float32(0.05)
    # The mean of 320 000 values has a standard deviation of 5e-5, each bin count one of 95 around 10 000.
    assert abs(float(rows.mean())) < 4e-4
    counts, _ = np.histogram(rows, bins=32, range=(-0.05, 0.05))
    assert np.abs(counts - 10_000).max() < 800
    assert abs(np.corrcoef(rows.T) - np.eye(16)).max() < 0.05


def test_seed_changes_the_rows() -> None:
    ids = np.arange(10, dtype=np.int64)
    assert not np.array_equal(Uniform(1.0, seed=1).rows(ids, dim=4), Uniform(1.0, seed=2).rows(ids, dim=4))


@pytest.mark.parametrize("bound", [-1.0, float("inf"), float("nan"), "1"])
def test_uniform_refuses_a_wrong_bound(bound: Any) -> None:
    with pytest.raises(UsageError, match="bound of Uniform must be"):
        Uniform(bound)
    with pytest.raises(UsageError, match=r"seed of Uniform must be .*; got 1\.5"):
        Uniform(1.0, seed=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_first_rows_are_cast_to_the_table_dtype(dtype: torch.dtype) -> None:
    table = HashTable("user", 4, dtype=dtype, initializer=Uniform(0.1))
    ids = torch.tensor([1, -1])
    expected = torch.from_numpy(Uniform(0.1).rows(ids.numpy(), dim=4)).to(dtype)
    assert torch.equal(table.embedding[table.lookup(ids)], expected)


@pytest.mark.parametrize(("start", "expected"), [(None, 0.0), (0.5, 0.5), (2, 2.0)])
def test_constant_first_rows(start: float | None, expected: float) -> None:
    table = HashTable("user", 2, initializer=start)
    assert table.embedding[table.lookup(torch.arange(3))].tolist() == [[expected] * 2] * 3


def test_function_sees_each_new_id_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_store, "INITIALIZER_ROWS_MAX", 4)
    calls: list[list[int]] = []

    def first_rows(ids: torch.Tensor) -> torch.Tensor:
        calls.append(ids.tolist())
        rows = ids.unsqueeze(1).expand(-1, 2).double()
        ids.zero_()  # Its own copy: this must not reach the table.
        return rows * 1.0

    table = HashTable("user", 2, initializer=first_rows)
    table.lookup(torch.tensor([7, 8, 7]))
    table.lookup(torch.tensor([8, 9, 1, 2, 3, 4]))
    assert calls == [[7, 8], [9, 1, 2, 3], [4]]
    ids = table.ids()
    assert ids.tolist() == [7, 8, 9, 1, 2, 3, 4]
    assert table.embedding[table.used_rows()].tolist() == [[float(id)] * 2 for id in ids.tolist()]


def test_function_that_needs_grad_is_cut_off() -> None:
    weight = torch.ones(2, requires_grad=True)
    table = HashTable("user", 2, initializer=lambda ids: weight.expand(len(ids), 2) * 1)
    table.lookup(torch.tensor([1]))
    assert not table.embedding.requires_grad


def test_faulty_function_leaves_no_id_behind() -> None:
    good = [True]

    def first_rows(ids: torch.Tensor) -> torch.Tensor:
        if not good[0]:
            raise ZeroDivisionError
        return torch.ones(len(ids), 2)

    table = HashTable("user", 2, initializer=first_rows)
    table.lookup(torch.tensor([1]))
    good[0] = False
    with pytest.raises(ZeroDivisionError):
        table.lookup(torch.tensor([1, 2, 3]))
    assert table.ids().tolist() == [1]


@pytest.mark.parametrize(
    ("value", "found"),
    [(torch.ones(1, 3), r"\(1, 3\)"), (torch.ones(2), r"\(2,\)"), ([1.0, 1.0], "list"), (None, "None")],
)
def test_wrong_result_of_a_function_is_named(value: Any, found: str) -> None:
    table = HashTable("user", 2, initializer=lambda ids: value)
    with pytest.raises(UsageError, match=rf"initializer returned .*found .*{found}.*, expected \(1, 2\)"):
        table.lookup(torch.tensor([1]))
    assert len(table) == 0
