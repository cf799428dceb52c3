"""What a Saver can tell of its filters before it saves."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from asyncckpt import filters
from asyncckpt.errors import UnsupportedError, UsageError
from asyncckpt.model.table import Column, Role, TableSchema
from asyncckpt.pipeline.filter_rules import row_rules

SCHEMA = TableSchema(
    (
        Column("id", torch.int64, (), Role.ID),
        Column("embedding", torch.float32, (16,), Role.WEIGHT),
        Column("sum", torch.float32, (1,), Role.OPTIMIZER),
        Column("count", torch.int64, (), Role.METADATA),
    )
)
TABLES = {"user": SCHEMA, "user.candidates": TableSchema(SCHEMA.columns[:1] + SCHEMA.columns[3:])}


def everything(columns: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.ones_like(columns["id"], dtype=torch.bool)


def test_good_filters_are_given_back_in_order() -> None:
    wanted = [
        filters.keep_rows("user", everything),
        filters.keep_rows("*.candidates", everything),
        filters.quantize("user@embedding", bits=4),
        filters.cast("*", torch.float16),
        filters.cast("model.weight", torch.bfloat16),  # Not known before a save.
        filters.cast("user@count", torch.int32),
        filters.skip_zero_rows("user@sum"),
        filters.compress("zstd", level=22, name="user@*"),
        filters.compress(),
    ]
    assert filters.check_filters(iter(wanted), TABLES) == tuple(wanted)
    assert filters.check_filters([], {}) == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: filters.keep_rows("user", None), "not callable"),  # type: ignore[arg-type]
        (lambda: filters.keep_rows("", everything), "name"),
        (lambda: filters.cast(7, torch.float16), "name"),  # type: ignore[arg-type]
        (lambda: filters.cast("x", torch.bool), "float or integer"),
        (lambda: filters.cast("x", "float16"), "float or integer"),  # type: ignore[arg-type]
        (lambda: filters.quantize("x", bits=2), "8 or 4"),
        (lambda: filters.quantize("x", bits=True), "8 or 4"),
        (lambda: filters.compress("gzip"), "gzip"),
        (lambda: filters.compress(level=0), "level"),
        (lambda: filters.compress(level=23), "level"),
        (lambda: filters.compress(level=1.5), "level"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_usage_errors(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (filters.compress(), "must be a list"),
        ("compress", "must be a list"),
        ([everything], "one of asyncckpt.filters"),
        ([filters.keep_rows("item", everything)], "there is no table 'item'"),
        ([filters.cast("user@weight", torch.float16)], "has no column 'weight'"),
        ([filters.cast("user@id", torch.int32)], "ids are always stored as they are"),
        ([filters.compress(name="user@id")], "ids are always stored as they are"),
        ([filters.cast("user@embedding", torch.int8)], "only float to float"),
        ([filters.cast("user@embedding", torch.float32)], "not smaller"),
        ([filters.cast("user@count", torch.float16)], "only float to float"),
        ([filters.quantize("user@count")], "needs floats"),
        ([filters.quantize("user@sum")], "not become smaller"),
        ([filters.cast("*", torch.float16), filters.quantize("user@embedding")], "an earlier filter"),
        ([filters.compress(), filters.compress(name="user@sum")], "an earlier filter"),
        ([filters.compress(), filters.cast("user@*", torch.float16)], "comes too late"),
        ([filters.skip_zero_rows("*"), filters.quantize("user@embedding")], "comes too late"),
    ],
)
def test_filters_that_can_be_for_no_save_are_usage_errors(wanted: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        filters.check_filters(wanted, TABLES)


def test_a_name_with_marks_of_patterns_stands_for_itself_too() -> None:
    tables = {"a[0]": SCHEMA}
    assert filters.check_filters([filters.keep_rows("a[0]", everything)], tables)
    assert row_rules([filters.keep_rows("a[0]", everything)], "a[0]")


def test_without_the_package_compression_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UnsupportedError, match=r"asyncckpt\[zstd\]"):
        filters.compress()
