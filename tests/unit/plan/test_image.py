"""Files of arrays that all begin on a page: pads fill the holes, and any reader of safetensors is content."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors

from asyncckpt.format.names import Attempt
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.table import Role
from asyncckpt.native import PAGE_BYTES
from asyncckpt.plan import image as image_module
from asyncckpt.plan.image import plan_apart, rows_on_pages, split_rows


def column(name: str, rows: int, row_bytes: int = 1) -> BlockSpec:
    return BlockSpec(
        name=f"t@{name}",
        role=Role.METADATA,
        dtype="uint8",
        stored_dtype="U8",
        stored_itemsize=1,
        shape=(rows, row_bytes),
        stored_shape=(rows, row_bytes),
        table="t",
        column=name,
    )


def test_every_array_but_pads_begins_on_a_page(tmp_path: Path) -> None:
    specs = [column("a", 5), column("b", PAGE_BYTES), column("c", 0), column("d", 4097), column("e", 1)]
    places = [7 * PAGE_BYTES * number for number in range(len(specs))]
    image = plan_apart(specs, places, parallel=1, rank=0, first_file=3)
    [file] = image.files
    assert file.name == "r00000-003.safetensors"
    assert [block.spec for block in image.blocks[: len(specs)]] == specs
    assert all(block.offset % PAGE_BYTES == 0 for block in image.blocks[: len(specs)])
    pads = image.blocks[len(specs) :]
    assert [pad.spec.bytes for pad in pads] == [4091, 4095]
    assert {pad.spec.role for pad in pads} == {Role.PAD}
    assert image.pads == ((places[0] + 5, 4091), (places[3] + 4097, 4095))
    assert file.extents == (
        (places[0], PAGE_BYTES),
        (places[1], PAGE_BYTES),
        (places[3], 2 * PAGE_BYTES),
        (places[4], 1),
    )
    assert image.offsets.tolist() == [*places, *(at for at, _ in image.pads)]
    raw = bytearray(file.header.stamp(Attempt.new(1)))
    for number in file.blocks:
        assert len(raw) == image.blocks[number].offset
        raw += bytes([number]) * image.blocks[number].spec.bytes
    assert len(raw) == file.bytes
    (tmp_path / "f").write_bytes(raw)
    with safetensors.safe_open(tmp_path / "f", framework="np") as opened:
        for number, spec in enumerate(specs):
            found = opened.get_tensor(spec.name)
            assert found.shape == spec.shape
            assert np.all(found == number)


def test_blocks_are_spread_over_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_module, "FILE_TARGET_BYTES", 6000)
    image = plan_apart([column(name, 5000) for name in "abcd"], [0, 8192, 16384, 24576], parallel=3, rank=0)
    assert len(image.files) == 3
    assert sorted(number for file in image.files for number in file.blocks if number < 4) == [0, 1, 2, 3]


def test_nothing_makes_no_files() -> None:
    assert plan_apart([], [], parallel=4, rank=0).files == ()


@pytest.mark.parametrize("row_bytes", [1, 3, 8, 12, 128, 264, 4096, 5000])
def test_parts_of_a_large_column_are_whole_pages(monkeypatch: pytest.MonkeyPatch, row_bytes: int) -> None:
    monkeypatch.setattr(image_module, "BLOCK_BYTES_MAX", 3 * PAGE_BYTES * row_bytes)
    whole = column("a", 10 * PAGE_BYTES + 7, row_bytes)
    parts = split_rows(whole, unit=rows_on_pages(row_bytes))
    assert len(parts) > 1
    assert all(part.bytes % PAGE_BYTES == 0 for part in parts[:-1])
    assert sum(part.shape[0] for part in parts) == whole.shape[0]
    assert [part.row_begin for part in parts] == list(np.cumsum([0, *(p.shape[0] for p in parts[:-1])]))
