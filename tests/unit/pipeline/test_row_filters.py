"""Row filters on staged tables: the rows that are written, their bytes, what is told of them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncckpt import filters
from asyncckpt.errors import FilterError
from asyncckpt.model.block import TableFacts
from asyncckpt.model.source import SpanSource
from asyncckpt.pipeline import filter_types as staged_state
from asyncckpt.pipeline import row_filters
from asyncckpt.pipeline.filter_types import FilteredState
from asyncckpt.pipeline.row_filters import run_row_filters
from tests.unit.pipeline.staged import CountedRows, load_blocks, staged_dense, staged_table

ROWS = 1000


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> int:
    """Limits of some kilobytes, so that everything comes in many parts, windows and chunks; returns a chunk's bytes."""
    chunk_bytes = 5000
    monkeypatch.setattr(row_filters, "WINDOW_BYTES", 7000)
    monkeypatch.setattr(row_filters, "BLOCK_BYTES_MAX", 9000)
    monkeypatch.setattr(row_filters, "ENCODED_BYTES_MAX", 4000)
    monkeypatch.setattr(staged_state, "CHUNK_BYTES", chunk_bytes)
    return chunk_bytes


def columns_of(*, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "id": torch.randperm(10 * ROWS, generator=generator)[:ROWS] - 5000,
        "embedding": torch.rand(ROWS, 16, generator=generator),
        "sum": torch.where(torch.rand(ROWS, 1, generator=generator) < 0.3, 1.5, 0.0) * torch.ones(ROWS, 3),
        "count": torch.randint(0, 9, (ROWS,), generator=generator),
        "pair": torch.randn(ROWS, 2, generator=generator, dtype=torch.complex128),
    }


def check(
    loaded: dict[str, torch.Tensor], table: str, columns: dict[str, torch.Tensor], rows: Any = slice(None)
) -> None:
    for name, values in columns.items():
        assert torch.equal(loaded[f"{table}@{name}"], values[rows]), name


def test_without_filters_all_is_written_as_it_is(small_windows: int) -> None:
    columns = columns_of()
    dense = torch.arange(5000.0)
    state = run_row_filters([], [staged_table("user", columns)], [staged_dense("scale", dense)])
    loaded = load_blocks(state.blocks, chunk_bytes=small_windows)
    check(loaded, "user", columns)
    assert torch.equal(loaded["scale"], dense)
    assert state.tables == (TableFacts(name="user", rows_count=ROWS, shard=(0, 1)),)
    assert not any(block.spec.encoding for block in state.blocks)


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1000, 5000])
def test_kept_rows_are_those_of_all_columns(small_windows: int, chunk_bytes: int) -> None:
    columns = columns_of() if chunk_bytes > 7 else {name: values[:40] for name, values in columns_of().items()}
    rule = filters.keep_rows("user", lambda found: found["count"] >= 3)
    state = run_row_filters([rule], [staged_table("user", columns)], [])
    kept = columns["count"] >= 3
    check(load_blocks(state.blocks, chunk_bytes=chunk_bytes), "user", columns, kept)
    (facts,) = state.tables
    assert (facts.rows_count, facts.removed_count) == (int(kept.sum()), 0)
    name = f"{test_kept_rows_are_those_of_all_columns.__name__}.<locals>.<lambda>"
    assert facts.filters == ({"kind": "keep_rows", "name": name, "kept": int(kept.sum()), "of": len(kept)},)


def test_predicates_see_all_columns_and_are_anded(small_windows: int) -> None:
    columns = columns_of()
    seen: list[int] = []

    class Positive:
        def __call__(self, found: dict[str, torch.Tensor]) -> torch.Tensor:
            assert found.keys() == columns.keys()
            assert {name: (v.dtype, v.shape[1:]) for name, v in found.items()} == {
                name: (v.dtype, v.shape[1:]) for name, v in columns.items()
            }
            seen.extend(found["id"].tolist())
            return found["id"] > 0

    rules = [
        filters.keep_rows("u*", Positive()),
        filters.keep_rows("user", lambda c: c["count"].numpy() > 2),
        filters.keep_rows("other*", lambda c: c["id"] < 0),
    ]
    state = run_row_filters(rules, [staged_table("user", columns), staged_table("item", columns)], [])
    assert seen == columns["id"].tolist()
    loaded = load_blocks(state.blocks, chunk_bytes=small_windows)
    kept = (columns["id"] > 0) & (columns["count"] > 2)
    check(loaded, "user", columns, kept)
    check(loaded, "item", columns)
    user, item = state.tables
    assert [record["kept"] for record in user.filters] == [
        int((columns["id"] > 0).sum()),
        int((columns["count"] > 2).sum()),
    ]
    assert user.filters[0]["name"].endswith("Positive")
    assert item.filters == ()


def test_a_delta_takes_out_what_is_not_kept(small_windows: int) -> None:
    columns = columns_of()
    touched = np.sort(np.random.default_rng(0).choice(ROWS, 300, replace=False))
    ids = columns["id"].numpy()
    removed = np.array([10**6, ids[touched[0]], -(10**6)])
    rule = filters.keep_rows("user", lambda found: found["count"] >= 3)
    staged = staged_table("user", columns, kept=touched, removed=removed, whole=False)
    state = run_row_filters([rule], [staged], [])
    is_kept = columns["count"].numpy()[touched] >= 3
    loaded = load_blocks(state.blocks, chunk_bytes=small_windows)
    check({k: v for k, v in loaded.items() if "#" not in k}, "user", columns, touched[is_kept])
    expected = np.unique(np.concatenate([removed, ids[touched[~is_kept]]]))
    assert np.array_equal(loaded["user@#removed"].numpy(), expected)
    (facts,) = state.tables
    assert (facts.whole, facts.rows_count, facts.removed_count) == (False, int(is_kept.sum()), len(expected))
    assert facts.filters[0]["of"] == 300


def test_rows_chosen_before_are_counted_without_a_filter() -> None:
    columns = columns_of()
    state = run_row_filters([], [staged_table("user", columns, kept=np.array([3, 5]), whole=False)], [])
    check(load_blocks(state.blocks), "user", columns, [3, 5])
    assert (state.tables[0].rows_count, state.tables[0].removed_count) == (2, 0)
    assert not any("#removed" in block.spec.name for block in state.blocks)


def test_whole_tables_of_a_delta_remove_nothing() -> None:
    state = run_row_filters(
        [filters.keep_rows("*", lambda found: found["count"] < 0)], [staged_table("user", columns_of())], []
    )
    assert (state.tables[0].rows_count, state.tables[0].removed_count) == (0, 0)
    assert load_blocks(state.blocks)["user@embedding"].shape == (0, 16)


def test_sparse_rows_are_fetched_by_windows(small_windows: int) -> None:
    columns = columns_of()
    staged = staged_table("user", columns, kept=np.arange(0, ROWS, 97))
    state = run_row_filters([], [staged], [])
    check(load_blocks(state.blocks, chunk_bytes=small_windows), "user", columns, slice(0, ROWS, 97))
    fetched = staged.columns[1].blocks[0].data
    assert isinstance(fetched, CountedRows)
    assert fetched.rows_max <= small_windows // 64


ENCODINGS = [
    [filters.skip_zero_rows("user@sum")],
    [filters.compress("zstd")],
    [filters.skip_zero_rows("*"), filters.compress()],
    [filters.cast("*", torch.int32)],
    [filters.cast("*", torch.int16), filters.skip_zero_rows("*"), filters.compress(level=3)],
]


@pytest.mark.parametrize("rules", ENCODINGS, ids=lambda rules: "-".join(map(str, rules)))
@pytest.mark.parametrize("kept", [None, np.arange(1, ROWS, 3)], ids=["all", "some"])
def test_lossless_encodings_come_back(small_windows: int, rules: list[filters.RowFilter], kept: Any) -> None:
    columns = columns_of()
    dense = {"zeros": torch.zeros(3000), "step": torch.tensor(7, dtype=torch.int64), "w": torch.rand(50, 60)}
    staged = [staged_dense(name, values) for name, values in dense.items()]
    state = run_row_filters(rules, [staged_table("user", columns, kept=kept)], staged)
    loaded = load_blocks(state.blocks, chunk_bytes=small_windows)
    check(loaded, "user", columns, slice(None) if kept is None else kept)
    for name, values in dense.items():
        assert torch.equal(loaded[name], values)
    assert any(block.spec.encoding for block in state.blocks)
    for block in state.blocks:
        if block.spec.encoding:
            assert np.prod(block.spec.shape) * getattr(torch, block.spec.dtype).itemsize <= 4000
            assert block.spec.column != "id"


def test_casts_and_codes_are_made_while_they_are_written(small_windows: int) -> None:
    columns = columns_of()
    rules = [
        filters.quantize("user@embedding", bits=8),
        filters.cast("*", torch.bfloat16),
        filters.keep_rows("user", lambda found: found["id"] % 2 == 0),
    ]
    weight = torch.rand(300, 40)
    state = run_row_filters(rules, [staged_table("user", columns)], [staged_dense("head.weight", weight)])
    by_name = {block.spec.name: block.spec for block in state.blocks}
    assert by_name["user@embedding"].encoding == ({"kind": "quantize", "bits": 8},)  # The first that matches.
    assert by_name["user@embedding"].stored_shape[1] == 24
    assert by_name["user@sum"].stored_dtype == by_name["head.weight"].stored_dtype == "BF16"
    assert by_name["user@count"].encoding == by_name["user@pair"].encoding == ()
    loaded = load_blocks(state.blocks, chunk_bytes=small_windows)
    kept = columns["id"] % 2 == 0
    assert torch.equal(loaded["user@sum"], columns["sum"][kept])  # 1.5 is the same in both.
    assert torch.equal(loaded["head.weight"], weight.bfloat16().float())
    error = (loaded["user@embedding"] - columns["embedding"][kept]).abs().max()
    assert 0 < error <= 1 / 509


def test_a_part_of_a_large_tensor_keeps_its_place(small_windows: int) -> None:
    whole = torch.zeros(400, 10)
    whole[::7] = torch.rand(58, 10)
    parts = []
    for begin in (0, 250):
        values = whole[begin : begin + 250]
        dense = staged_dense("w", values)
        spec = replace(dense.spec, row_begin=begin, whole_shape=(400, 10))
        parts.append(replace(dense, spec=spec))
    for rules in ([], [filters.cast("w", torch.float16)], [filters.skip_zero_rows("w")]):
        state = run_row_filters(rules, [], parts)
        loaded = load_blocks(state.blocks, chunk_bytes=small_windows)["w"]
        assert torch.equal(loaded, whole if rules != [filters.cast("w", torch.float16)] else whole.half().float())


def test_empty_tables_and_columns_without_numbers() -> None:
    columns = {"id": torch.empty(0, dtype=torch.int64), "embedding": torch.empty(0, 8), "none": torch.empty(0, 0)}
    rules = [
        filters.keep_rows("*", lambda found: found["id"] > 0),
        filters.quantize("*"),
        filters.skip_zero_rows("*"),
        filters.compress(),
    ]
    state = run_row_filters(rules, [staged_table("user", columns)], [])
    loaded = load_blocks(state.blocks)
    assert {name: tuple(values.shape) for name, values in loaded.items()} == {
        "user@id": (0,), "user@embedding": (0, 8), "user@none": (0, 0),
    }  # fmt: skip
    full = {"id": torch.arange(5), "none": torch.empty(5, 0)}
    state = run_row_filters(rules, [staged_table("user", full)], [])
    assert load_blocks(state.blocks)["user@none"].shape == (4, 0)


def test_memory_that_is_held_goes_with_what_is_stored(small_windows: int) -> None:
    """What does not become smaller is fetched again when it is written, not held."""
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (ROWS, 16), dtype=np.uint8))
    columns = {"id": torch.arange(ROWS), "noise": noise, "zeros": torch.zeros(ROWS, 16)}
    state = run_row_filters([filters.compress()], [staged_table("user", columns)], [])
    held = {
        block.spec.name: isinstance(block.source, SpanSource)
        for block in state.blocks
    }  # fmt: skip
    assert held == {"user@id": False, "user@noise": False, "user@zeros": True}
    check(load_blocks(state.blocks, chunk_bytes=small_windows), "user", columns)


# -- what is refused ---------------------------------------------------------------------------------------------------


def _raise(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("predicate", "found"),
    [
        (lambda c: _raise(ValueError("bad day")), "ValueError: bad day"),
        (lambda c: _raise(SystemExit(3)), "SystemExit: 3"),
        (lambda c: c["nothing"] > 0, "KeyError"),
        (lambda c: c["count"], "torch.int64"),
        (lambda c: c["embedding"] > 0, "16"),
        (lambda c: c["count"][1:] > 0, str(ROWS - 1)),
        (lambda c: c["count"].numpy(), "int64"),
        (lambda c: (c["count"] > 3).tolist(), "list"),
        (lambda c: True, "bool"),
        (lambda c: None, "None"),
        (lambda c: torch.empty(len(c["count"]), dtype=torch.bool, device="meta"), "NotImplementedError"),
        (lambda c: (c["count"] > 3).to_sparse(), "TypeError"),
    ],
)
def test_wrong_answers_of_a_predicate_are_filter_errors(predicate: Callable[..., Any], found: str) -> None:
    with pytest.raises(FilterError, match="table 'user'") as caught:
        run_row_filters([filters.keep_rows("us*", predicate)], [staged_table("user", columns_of())], [])
    assert found in str(caught.value)
    assert "keep_rows('us*'" in str(caught.value)


def test_numbers_that_cannot_be_encoded_name_the_id(small_windows: int) -> None:
    columns = columns_of()
    columns["embedding"][700, 3] = float("nan")
    columns["sum"][500, 1] = 1e30
    expected = {"quantize": int(columns["id"][700]), "cast": int(columns["id"][500])}
    kept = np.arange(100, ROWS, 50)
    assert {500, 700} <= set(kept.tolist())
    for chosen in (None, kept):
        for rule in (filters.quantize("user@embedding"), filters.cast("user@sum", torch.float16)):
            for rules in ([rule], [rule, filters.compress()]):
                with pytest.raises(FilterError) as caught:
                    load_blocks(run_row_filters(rules, [staged_table("user", columns, kept=chosen)], []).blocks)
                kind = str(rule).partition("(")[0]
                assert f"the row of id {expected[kind]}" in str(caught.value)
                assert "user@" in str(caught.value)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([filters.cast("head.weigth", torch.float16)], "not saved"),
        ([filters.keep_rows("item", lambda c: c["id"] > 0)], "not saved"),
        ([filters.skip_zero_rows("item@embedding")], "not saved"),
        ([filters.quantize("head.bias")], "cannot be applied to 'head.bias'"),
        ([filters.cast("head.step", torch.float16)], "cannot be applied to 'head.step'"),
        ([filters.compress(), filters.cast("head.*", torch.float16)], "comes too late"),
    ],
)
def test_filters_that_do_not_fit_the_state_are_filter_errors(rules: list[filters.RowFilter], message: str) -> None:
    dense = {"head.weight": torch.rand(4, 30), "head.bias": torch.rand(4), "head.step": torch.tensor(3)}
    with pytest.raises(FilterError, match=message):
        run_row_filters(
            rules, [staged_table("user", columns_of())], [staged_dense(name, values) for name, values in dense.items()]
        )


def test_a_run_can_be_ended() -> None:
    calls: list[int] = []

    def enter_state() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise InterruptedError

    def run() -> FilteredState:
        return run_row_filters([filters.compress()], [staged_table("user", columns_of())], [], enter_state=enter_state)

    with pytest.raises(InterruptedError):
        run()


def test_the_staged_state_is_not_changed(small_windows: int) -> None:
    """Also with float64, which the arithmetic needs no copy for."""
    columns = {"id": torch.arange(50), "embedding": torch.rand(50, 16, dtype=torch.float64)}
    before = columns["embedding"].clone()
    dense = torch.rand(20, 16, dtype=torch.float64)
    dense_before = dense.clone()
    for rule in (filters.quantize("*"), filters.quantize("*", bits=4), filters.cast("*", torch.float16)):
        staged = staged_table("user", columns)
        load_blocks(run_row_filters([rule], [staged], [staged_dense("w", dense)]).blocks)
    assert torch.equal(columns["embedding"], before)
    assert torch.equal(dense, dense_before)
