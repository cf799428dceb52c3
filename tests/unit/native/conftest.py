"""Every test of this folder runs on the compiled core and on its portable twin."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import xxhash

from asyncckpt.native import LEAF_BYTES, PAGE_BYTES, U8, U64, Core, NativeCore, TwinCore, UnusableLibrary

SEED = 20240607


def make_core(name: str) -> Core:
    if name == "twin":
        return TwinCore()
    try:
        return NativeCore()
    except UnusableLibrary as error:
        if os.environ.get("ASYNCCKPT_NATIVE") == "1":
            raise
        pytest.skip(f"the compiled core is not built: {error}")


@pytest.fixture(params=["native", "twin"], scope="session")
def core(request: pytest.FixtureRequest) -> Core:
    return make_core(request.param)


@pytest.fixture(scope="session")
def native() -> Core:
    """The compiled core alone, for what only it has."""
    return make_core("native")


@pytest.fixture
def rng() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


@pytest.fixture
def page_aligned(rng: np.random.Generator) -> Callable[[int], U8]:
    """Makes random bytes that start on a page and are readable up to the end of their last page."""

    def make(count: int) -> U8:
        raw = np.zeros(-(-count // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES, dtype=np.uint8)
        start = -int(raw.ctypes.data) % PAGE_BYTES
        raw[start : start + count] = rng.integers(0, 256, count, dtype=np.uint8)
        return raw[start : start + count]

    return make


@pytest.fixture(scope="session")
def spans_of() -> Callable[[list[U8]], U64]:
    """Makes the (address, bytes) table of some arrays."""
    return lambda arrays: np.array([(a.ctypes.data, a.nbytes) for a in arrays], dtype=np.uint64).reshape(-1, 2)


@pytest.fixture(scope="session")
def rows_of() -> Callable[[bytes], list[bytes]]:
    """What a digest must be, and those of more than one leaf behind it, computed by the xxhash package."""

    def rows(data: bytes) -> list[bytes]:
        leaves = [data[begin : begin + LEAF_BYTES] for begin in range(0, len(data), LEAF_BYTES)]
        digests = [xxhash.xxh3_128(leaf).digest() for leaf in leaves]
        return [xxhash.xxh3_128(b"".join(digests)).digest(), *(digests if len(leaves) > 1 else ())]

    return rows


@pytest.fixture(scope="session")
def digest_of(rows_of: Callable[[bytes], list[bytes]]) -> Callable[[bytes], bytes]:
    return lambda data: rows_of(data)[0]
