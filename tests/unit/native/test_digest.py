"""Digests equal those of the xxhash package, at once and piecewise, for every size around a border."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from asyncckpt.native import DIGEST_BYTES, LEAF_BYTES, U8, U64, Core, library, row_begins

# XXH3 changes its way of working at 16, 128, 240 and 1024 bytes.
SIZES = [0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 1024, 1025, 65536, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1]
SIZES += [2 * LEAF_BYTES, 5 * LEAF_BYTES + 12345]


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_spans(
    core: Core,
    rng: np.random.Generator,
    spans_of: Callable[[list[U8]], U64],
    digest_of: Callable[[bytes], bytes],
    threads: int,
) -> None:
    arrays = [rng.integers(0, 256, size + 1, dtype=np.uint8)[1:] for size in SIZES]
    digests = core.digest(spans_of(arrays), threads=threads)
    assert digests.shape == (len(SIZES), DIGEST_BYTES)
    assert [row.tobytes() for row in digests] == [digest_of(array.tobytes()) for array in arrays]


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_spans_with_their_leaves(
    core: Core,
    rng: np.random.Generator,
    spans_of: Callable[[list[U8]], U64],
    rows_of: Callable[[bytes], list[bytes]],
    threads: int,
) -> None:
    arrays = [rng.integers(0, 256, size + 1, dtype=np.uint8)[1:] for size in SIZES]
    found = core.digest(spans_of(arrays), threads=threads, leaves=True)
    assert [row.tobytes() for row in found] == [row for array in arrays for row in rows_of(array.tobytes())]
    begins = row_begins([array.nbytes for array in arrays])
    assert [found[begin].tobytes() for begin in begins[:-1]] == [rows_of(array.tobytes())[0] for array in arrays]


def test_very_many_small_spans(
    core: Core, rng: np.random.Generator, spans_of: Callable[[list[U8]], U64], digest_of: Callable[[bytes], bytes]
) -> None:
    data = rng.integers(0, 256, 100_000, dtype=np.uint8)
    arrays = [data[begin : begin + begin % 50] for begin in range(0, len(data), 50)]
    digests = core.digest(spans_of(arrays), threads=2)
    assert [row.tobytes() for row in digests] == [digest_of(array.tobytes()) for array in arrays]


def test_no_span(core: Core) -> None:
    assert core.digest(np.empty((0, 2), dtype=np.uint64)).shape == (0, DIGEST_BYTES)


def test_digester_takes_any_pieces(core: Core, rng: np.random.Generator, digest_of: Callable[[bytes], bytes]) -> None:
    digester = core.digester()
    for size in SIZES:
        data = rng.integers(0, 256, size, dtype=np.uint8)
        cuts = sorted({0, size, *rng.integers(0, size + 1, 7).tolist()})
        for begin, end in itertools.pairwise(cuts):
            digester.update(data.ctypes.data + begin, end - begin)
        # The digester starts anew after each end.
        assert digester.end() == digest_of(data.tobytes())
    assert digester.end() == digest_of(b"")


def test_digester_tells_its_leaves(
    core: Core, rng: np.random.Generator, rows_of: Callable[[bytes], list[bytes]]
) -> None:
    digester = core.digester()
    for size in SIZES:
        data = rng.integers(0, 256, size, dtype=np.uint8)
        for begin in range(0, size, LEAF_BYTES // 3 + 1):
            digester.update(data.ctypes.data + begin, min(LEAF_BYTES // 3 + 1, size - begin))
        assert [row.tobytes() for row in digester.end_rows()] == rows_of(data.tobytes())


def test_digesters_do_not_mix(core: Core, rng: np.random.Generator, digest_of: Callable[[bytes], bytes]) -> None:
    one, other = rng.integers(0, 256, (2, 1000), dtype=np.uint8)
    first, second = core.digester(), core.digester()
    first.update(one.ctypes.data, 1000)
    second.update(other.ctypes.data, 1000)
    assert second.end() == digest_of(other.tobytes())
    assert first.end() == digest_of(one.tobytes())


def test_wrong_table_is_refused(core: Core) -> None:
    with pytest.raises(ValueError, match="spans must be"):
        core.digest(np.zeros((1, 3), dtype=np.uint64))


def test_a_digester_whose_call_was_interrupted_has_room_for_its_leaves(
    native: Core, rows_of: Callable[[bytes], list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler of a signal raises behind the native call, which has taken the bytes."""
    data = np.zeros(4 * LEAF_BYTES, dtype=np.uint8)
    call = library.call

    def interrupted(*arguments: object) -> None:
        call(*arguments)
        raise KeyboardInterrupt

    digester = native.digester()
    with monkeypatch.context() as patched:
        patched.setattr(library, "call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            digester.update(data.ctypes.data, data.size)
    assert [row.tobytes() for row in digester.end_rows()] == rows_of(data.tobytes())
