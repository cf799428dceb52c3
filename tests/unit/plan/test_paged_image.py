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
from asyncckpt.plan import paged_image
from asyncckpt.plan.paged_image import plan_paged_image, split_pages


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
    image = plan_paged_image(specs, parallel=1, rank=0, first_file=3)
    [file] = image.files
    assert file.name == "r00000-003.safetensors"
    assert [block.spec for block in image.blocks[: len(specs)]] == specs
    assert all(block.offset % PAGE_BYTES == 0 for block in image.blocks[: len(specs)])
    pads = image.blocks[len(specs) :]
    assert [pad.spec.bytes for pad in pads] == [4091, 4095]
    assert {pad.spec.role for pad in pads} == {Role.PAD}
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
    from asyncckpt.plan import image as image_module

    monkeypatch.setattr(image_module, "FILE_TARGET_BYTES", 6000)
    image = plan_paged_image([column(name, 5000) for name in "abcd"], parallel=3, rank=0, first_file=0)
    assert len(image.files) == 3
    assert sorted(number for file in image.files for number in file.blocks if number < 4) == [0, 1, 2, 3]


def test_nothing_makes_no_files() -> None:
    assert plan_paged_image([], parallel=4, rank=0, first_file=0).files == ()


@pytest.mark.parametrize("row_bytes", [1, 3, 8, 12, 128, 264, 4096, 5000])
def test_parts_of_a_large_column_are_whole_pages(monkeypatch: pytest.MonkeyPatch, row_bytes: int) -> None:
    monkeypatch.setattr(paged_image, "BLOCK_BYTES_MAX", 3 * PAGE_BYTES * row_bytes)
    whole = column("a", 10 * PAGE_BYTES + 7, row_bytes)
    parts = split_pages(whole, row_bytes=row_bytes)
    assert len(parts) > 1
    assert all(part.bytes % PAGE_BYTES == 0 for part in parts[:-1])
    assert sum(part.shape[0] for part in parts) == whole.shape[0]
    assert [part.row_begin for part in parts] == list(np.cumsum([0, *(p.shape[0] for p in parts[:-1])]))
