from __future__ import annotations

import pytest

from asyncckpt.storage.object_store import MIB, PART_BYTES_MIN, PARTS_MAX, part_bytes_of


@pytest.mark.parametrize(
    "size", [1, PART_BYTES_MIN, PART_BYTES_MIN * PARTS_MAX, PART_BYTES_MIN * PARTS_MAX + 1, 5 << 40]
)
def test_a_file_has_no_more_parts_than_a_store_takes(size: int) -> None:
    part = part_bytes_of(size)
    assert part >= PART_BYTES_MIN
    assert part % MIB == 0
    assert -(-size // part) <= PARTS_MAX
