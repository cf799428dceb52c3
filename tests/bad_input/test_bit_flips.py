"""Case 17: bits of every byte of a small checkpoint flipped, one at a time. Every flip must be found.

The lowest and the highest bit of a byte; `make test-slow` flips all eight in the manifest and in the data, and bits in
the second half of the header, which is padding.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from crafted import Crafted, picture
from sentinels import Targets

import asyncckpt

ALL_BITS = tuple(range(8))
OUTER_BITS = (0, 7)


def flips_found(
    small: Crafted, path: Path, *, begin: int, end: int, bits: tuple[int, ...], verify: bool | str = "before"
) -> Counter[str]:
    """Flip bits of bytes [begin, end) in turn; what each load ended with. Verifying before, none touches a target."""
    targets = Targets()
    outcomes: Counter[str] = Counter()
    fd = os.open(path, os.O_RDWR)
    try:
        for offset in range(begin, end):
            sound = os.pread(fd, 1, offset)
            for bit in bits:
                os.pwrite(fd, bytes([sound[0] ^ (1 << bit)]), offset)
                outcomes[outcome(targets, small.root, verify=verify)] += 1
            os.pwrite(fd, sound, offset)
    finally:
        os.close(fd)
    assert targets.untouched or verify is True
    return outcomes


def outcome(targets: Targets, root: Path, *, verify: bool | str) -> str:
    try:
        targets.load(root, verify=verify)
    except asyncckpt.CheckpointError as error:
        return type(error).__name__
    return "loaded"


@pytest.mark.parametrize("bits", [OUTER_BITS, pytest.param(ALL_BITS, marks=pytest.mark.slow)])
def test_case_017_bit_flip_in_the_manifest(small: Crafted, bits: tuple[int, ...]) -> None:
    size = small.manifest_path.stat().st_size
    found = flips_found(small, small.manifest_path, begin=0, end=size, bits=bits)
    assert found == {"CorruptError": len(bits) * size}


@pytest.mark.parametrize("part", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_case_017_bit_flip_in_the_header(small: Crafted, part: int) -> None:
    quarter = small.document()["files"][0]["header_bytes"] // 4
    found = flips_found(small, small.shard_path(), begin=part * quarter, end=(part + 1) * quarter, bits=OUTER_BITS)
    assert found == {"CorruptError": 2 * quarter}


@pytest.mark.parametrize(
    ("verify", "bits"),
    [(True, OUTER_BITS), ("before", OUTER_BITS), pytest.param(True, ALL_BITS, marks=pytest.mark.slow)],
)
def test_case_017_bit_flip_in_the_data(small: Crafted, verify: bool | str, bits: tuple[int, ...]) -> None:
    begin, end = small.document()["files"][0]["header_bytes"], small.shard_path().stat().st_size
    found = flips_found(small, small.shard_path(), begin=begin, end=end, bits=bits, verify=verify)
    assert found == {"CorruptError": len(bits) * (end - begin)}


def test_case_017_flips_were_undone(small: Crafted) -> None:
    """The test of the tests: the same loads succeed where nothing is flipped."""
    before = picture(small.root)
    targets = Targets()
    assert outcome(targets, small.root, verify="before") == "loaded"
    assert targets.loaded
    assert picture(small.root) == before
