"""What a writer's checks refuse, by the name of the leaf or table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncckpt.errors import UnsupportedError, UsageError
from asyncckpt.format import limits
from asyncckpt.format.write_manifest import check_tables
from asyncckpt.model.block import BlockSpec, TableFacts
from asyncckpt.model.table import Role

BLOCK = BlockSpec(
    name="w", role=Role.DENSE, dtype="float32", stored_dtype="F32", stored_itemsize=4, shape=(2, 3), stored_shape=(2, 3)
)
TABLE = TableFacts(name="user", rows_count=3, shard=(1, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": (1,) * 65, "stored_shape": (1,)}, "too many dimensions, found 65"),
        ({"whole_shape": (2**61, 3)}, "too large"),
        ({"whole_shape": (0, 2**61)}, "too large"),
        ({"stored_shape": (2**61, 1)}, "too large"),
        ({"dtype": "complex128", "shape": (1,) * 64, "stored_shape": (1,)}, "expected at most 63"),
        ({"encoding": ({"kind": "cast"},) * 9}, "too many steps, found 9, expected 8"),
    ],
)
def test_a_block_is_refused_by_its_name(changes: dict[str, Any], message: str) -> None:
    limits.check_block(BLOCK)
    with pytest.raises(UnsupportedError, match=f"'w'.*{message}"):
        limits.check_block(replace(BLOCK, **changes))


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0), (0, 2**63), (0, 2**70)])
def test_a_shard_that_no_reader_takes(shard: tuple[int, int]) -> None:
    check_tables([TABLE, replace(TABLE, name="item", shard=(0, 2**63 - 1))])
    with pytest.raises(UsageError, match="table 'user' has an impossible shard"):
        check_tables([replace(TABLE, shard=shard)])


def test_a_table_twice() -> None:
    with pytest.raises(UsageError, match="a table is given twice"):
        check_tables([TABLE, TABLE])
