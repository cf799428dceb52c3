"""Parts of ranks that do not fit together: refused before a target is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from tests.bad_input.crafted import Crafted
from tests.chains.model import new_table
from tests.end_to_end.merged_ranks import merge, save_each
from tests.end_to_end.ranks_world import Target, TrainedRanks, insert, row, saved_by
from tests.worlds.rows import rows_of


def untouched_by(root: Path, match: str, error: type[Exception] = asyncckpt.CorruptError) -> None:
    target = Target(0, 2)
    before = rows_of(target.table)
    with pytest.raises(error, match=match):
        target.load(root)
    assert rows_of(target.table) == before
    assert all(bool((piece == 1).all()) for piece in target.pieces.values())
    assert torch.equal(target.plain["replica"], torch.zeros(10))


def _drop_rank(document: dict[str, Any]) -> None:
    document["others"].pop()


def _repeat_rank(document: dict[str, Any]) -> None:
    document["others"][1] = document["others"][0]


def _other_count(document: dict[str, Any]) -> None:
    document["ranks_count"] = 4


def _rank_without_files(document: dict[str, Any]) -> None:
    document["others"][1].update(files=[], blocks=[], tables=[])


def _block_of_rank_1(document: dict[str, Any], name: str) -> dict[str, Any]:
    found = next(block for block in document["others"][0]["blocks"] if block["name"] == name)
    assert isinstance(found, dict)
    return found


def _hole(document: dict[str, Any]) -> None:
    _block_of_rank_1(document, "rows")["row_begin"] = 5


def _covered_twice(document: dict[str, Any]) -> None:
    _block_of_rank_1(document, "boxes")["column_begins"] = [1]


def _outside(document: dict[str, Any]) -> None:
    _block_of_rank_1(document, "boxes")["column_begins"] = [5]


def _other_shape(document: dict[str, Any]) -> None:
    _block_of_rank_1(document, "rows")["whole_shape"] = [12, 3]


def _other_dtype(document: dict[str, Any]) -> None:
    _block_of_rank_1(document, "rows")["dtype"] = "int32"


def _values_missing(document: dict[str, Any]) -> None:
    document["others"][0]["values"].pop()


def _leaf_missing(document: dict[str, Any]) -> None:
    document["others"][1]["tree"] = {"d": []}


def _same_shard_twice(document: dict[str, Any]) -> None:
    document["others"][1]["tables"][0]["shard"] = [1, 3]


def _other_columns(document: dict[str, Any]) -> None:
    found = _block_of_rank_1(document, "user@sum")
    found.update(name="user@age", column="age", key=found["key"])


def _bad_value(document: dict[str, Any]) -> None:
    document["others"][0]["values"][0] = {"int": "zz"}


def refuse(tmp_path: Path, change: Any, match: str) -> None:
    saved_by(tmp_path, 3)
    Crafted(tmp_path / "all", 5).edit(change)
    untouched_by(tmp_path / "all", match)


def _name(value: Any) -> str | None:
    return value.__name__[1:] if callable(value) else None


@pytest.mark.any_core
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_drop_rank, "has not the parts of all ranks"),
        (_repeat_rank, "lists a file of another rank"),
        (_other_count, "has not the parts of all ranks"),
        (_rank_without_files, "has no file of rank 2"),
    ],
    ids=_name,
)
def test_case_040_parts_of_ranks(tmp_path: Path, change: Any, match: str) -> None:
    refuse(tmp_path, change, match)


@pytest.mark.any_core
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_hole, "elements of tensor 'rows' are missing or covered twice"),
        (_covered_twice, "elements of tensor 'boxes' are missing or covered twice"),
        (_outside, "parts of tensor 'boxes' have another shape"),
        (_values_missing, "the tree and its values disagree"),
        (_leaf_missing, "paths of mappings in the tree"),
        (_same_shard_twice, "ranks 1 and 2 hold the same shard of table 'user'"),
    ],
    ids=_name,
)
def test_case_041_missing_or_twice_over_ranks(tmp_path: Path, change: Any, match: str) -> None:
    refuse(tmp_path, change, match)


@pytest.mark.any_core
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_other_shape, "tensor 'rows' is there twice, or its parts disagree"),
        (_other_dtype, "'rows'"),
        (_other_columns, "table 'user' has other columns in rank 1"),
    ],
    ids=_name,
)
def test_case_044_another_form_on_another_rank(tmp_path: Path, change: Any, match: str) -> None:
    refuse(tmp_path, change, match)


def test_case_049_damaged_value_of_another_rank_is_none_of_ours(tmp_path: Path) -> None:
    """The rank that it belongs to gets an error that names it."""
    saved_by(tmp_path, 3)
    Crafted(tmp_path / "all", 5).edit(_bad_value)
    with pytest.raises(asyncckpt.CorruptError, match=r"of rank 1 of step 5"):
        Target(1, 3).load(tmp_path / "all")
    Target(0, 3).load(tmp_path / "all")


def test_case_041_id_of_two_ranks(tmp_path: Path) -> None:
    """Found when the table gets it: the table is empty then."""
    tables = [new_table() for _ in range(2)]
    for rank, table in enumerate(tables):
        insert(table, {id: row(id) for id in (1, 2, 10 + rank)})
    root = save_each(tmp_path, [{}] * 2, tables=[{"user": table} for table in tables])
    target = new_table()
    insert(target, {5: row(5)})
    with pytest.raises(asyncckpt.CorruptError, match="table 'user', loaded into 'user', holds the same id twice"):
        asyncckpt.Loader(root, {"user": target}).load()
    assert rows_of(target) == {}


def test_case_045_chain_of_different_numbers_of_ranks(tmp_path: Path) -> None:
    with TrainedRanks(tmp_path, 2) as ranks:
        ranks.save(1)
        parent = ranks.written
        for saver in ranks.savers:
            saver.save(2)
        merge(
            ranks.root,
            2,
            [tmp_path / "0"],
            change=lambda rank, spec: None if spec.table is None else spec,
            parent=parent,
        )
        untouched_by(ranks.root, "its base, step 1, was saved by another number of ranks")


def test_case_045_delta_over_another_shard(tmp_path: Path) -> None:
    with TrainedRanks(tmp_path, 2) as ranks:
        ranks.save(1)
        ranks.save(2)

        def change(document: dict[str, Any]) -> None:
            document["tables"][0]["shard"] = [0, 4]

        Crafted(ranks.root, 2).edit(change)
        untouched_by(ranks.root, "table 'user' of rank 0 of step 2 holds another shard than in its base, step 1")
