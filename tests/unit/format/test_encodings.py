"""Encodings: what is lossless comes back bit for bit; nothing damaged is believed."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.errors import CheckpointError, CorruptError, UnsupportedError
from asyncckpt.format.dtypes import supported_dtypes
from asyncckpt.format.encodings import (
    ENCODED_BYTES_MAX,
    check_encoding,
    codec,
    decode,
    encode,
    misfit,
)
from asyncckpt.model.block import BlockSpec
from tests.unit.format.encoded import SKIP, ZSTD, cast, quantize, round_trip, spec_of
from tests.worlds.bits import raw_of

LOSSLESS = [[SKIP], [ZSTD], [SKIP, ZSTD]]
SHAPES = [(), (0,), (40,), (0, 3), (40, 0), (40, 3), (8, 2, 5)]


def sparse(dtype: torch.dtype, shape: tuple[int, ...], *, seed: int) -> torch.Tensor:
    """Random bytes, half of them zero, and every other row nothing but zeros."""
    generator = np.random.default_rng(seed)
    top = 2 if dtype is torch.bool else 256
    raw = torch.from_numpy(generator.integers(0, top, math.prod(shape) * dtype.itemsize, dtype=np.uint8))
    if not len(raw):
        return torch.empty(shape, dtype=dtype)
    raw[::2] = 0
    if shape:
        raw.reshape(shape[0], -1)[::2] = 0
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", supported_dtypes(), ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_lossless_encodings_keep_every_bit(dtype: torch.dtype) -> None:
    for seed, shape in enumerate(SHAPES):
        values = sparse(dtype, shape, seed=seed)
        for steps in LOSSLESS:
            if misfit(dtype, shape, steps[:1]) is None:
                assert raw_of(round_trip(values, steps)) == raw_of(values)
    assert len(encode(sparse(dtype, (400, 16), seed=1), [SKIP]).raw) < 400 * 16 * dtype.itemsize * 0.6


def test_rows_of_negative_zeros_and_nans_are_no_zero_rows() -> None:
    values = torch.zeros(64, 4)
    values[3] = -0.0
    values[5, 1] = float("nan")
    encoded = encode(values, [SKIP])
    assert encoded.steps == ({"kind": "skip_zero_rows", "rows": 2},)
    assert raw_of(round_trip(values, [SKIP])) == raw_of(values)


def test_rows_of_views_are_found_whatever_their_alignment() -> None:
    storage = torch.zeros(1 + 64 * 4)
    values = storage[1:].reshape(64, 4)
    values[7] = 1.0
    assert raw_of(round_trip(values, [SKIP])) == raw_of(values)


@pytest.mark.parametrize("steps", [[SKIP], [ZSTD], [SKIP, ZSTD]], ids=str)
def test_what_does_not_become_smaller_is_stored_as_it_is(steps: list[dict[str, Any]]) -> None:
    values = torch.from_numpy(np.random.default_rng(0).integers(1, 256, (100, 8), dtype=np.uint8))
    encoded = encode(values, steps)
    assert encoded.steps == ()
    assert encoded.raw.ctypes.data == values.data_ptr()
    assert (encoded.stored.dtype, encoded.stored.shape) == ("U8", (100, 8))


def test_shuffled_bytes_compress_better() -> None:
    values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    plain = len(zstandard.ZstdCompressor(level=1).compress(values.numpy().tobytes()))
    assert len(encode(values, [ZSTD]).raw) < 0.95 * plain


# -- bad input ---------------------------------------------------------------------------------------------------------


def encoded_block(steps: list[dict[str, Any]]) -> tuple[np.ndarray, BlockSpec]:
    values = torch.zeros(64, 16)
    values[::3] = torch.randn(22, 16, generator=torch.Generator().manual_seed(0))
    encoded = encode(values, steps)
    assert len(encoded.steps) == len(steps)
    return encoded.raw.copy(), spec_of(values, encoded)


def with_step(spec: BlockSpec, **members: Any) -> BlockSpec:
    return replace(spec, encoding=({**spec.encoding[0], **members}, *spec.encoding[1:]))


@pytest.mark.parametrize(
    ("steps", "change"),
    [
        ([SKIP], lambda raw, spec: (raw, with_step(spec, rows=21))),
        ([SKIP], lambda raw, spec: (raw, with_step(spec, rows=-1))),
        ([SKIP], lambda raw, spec: (raw, with_step(spec, rows=True))),
        ([SKIP], lambda raw, spec: (raw, with_step(spec, rows=2**60))),
        ([SKIP], lambda raw, spec: (raw ^ np.uint8(1), spec)),
        ([SKIP], lambda raw, spec: (raw[:-1], spec)),
        ([SKIP], lambda raw, spec: (raw, replace(spec, shape=(65, 16)))),
        ([SKIP], lambda raw, spec: (raw, replace(spec, shape=(0, 16)))),
        ([SKIP], lambda raw, spec: (raw, replace(spec, shape=()))),
        ([SKIP], lambda raw, spec: (raw, replace(spec, dtype="bool"))),
        ([SKIP], lambda raw, spec: (raw, replace(spec, encoding=()))),
        ([SKIP], lambda raw, spec: (raw, replace(spec, encoding=spec.encoding * 2))),
        ([SKIP], lambda raw, spec: (raw, replace(spec, encoding=({"kind": "skip_zero_rows"},)))),
        ([SKIP], lambda raw, spec: (raw, replace(spec, encoding=({"rows": 1},)))),
        ([SKIP], lambda raw, spec: (raw, replace(spec, encoding=("skip_zero_rows",)))),
        ([SKIP], lambda raw, spec: (raw, replace(spec, stored_shape=(len(raw) // 2,), stored_itemsize=2))),
        ([ZSTD], lambda raw, spec: (raw, with_step(spec, shuffle=0))),
        ([ZSTD], lambda raw, spec: (raw, with_step(spec, shuffle=2**40))),
        ([ZSTD], lambda raw, spec: (raw, with_step(spec, level="1"))),
        ([ZSTD], lambda raw, spec: (raw, replace(spec, shape=(63, 16)))),
        ([ZSTD], lambda raw, spec: (raw, replace(spec, shape=(2**50,)))),
        ([ZSTD], lambda raw, spec: (raw, replace(spec, shape=(0, 16)))),
        ([ZSTD], lambda raw, spec: (raw[::-1].copy(), spec)),
        ([ZSTD], lambda raw, spec: (np.zeros_like(raw), spec)),
        ([SKIP, ZSTD], lambda raw, spec: (raw, replace(spec, encoding=spec.encoding[::-1]))),
        ([SKIP, ZSTD], lambda raw, spec: (raw, replace(spec, encoding=spec.encoding[:1]))),
        ([cast(torch.float16)], lambda raw, spec: (raw, with_step(spec, dtype="float64"))),
        ([cast(torch.float16)], lambda raw, spec: (raw, with_step(spec, dtype="bfloat16"))),
        ([cast(torch.float16)], lambda raw, spec: (raw, with_step(spec, dtype=16))),
        ([cast(torch.float16)], lambda raw, spec: (raw, replace(spec, dtype="float16"))),
        ([cast(torch.float16)], lambda raw, spec: (raw, replace(spec, shape=(32, 32)))),
        ([quantize(8)], lambda raw, spec: (raw, with_step(spec, bits=4))),
        ([quantize(8)], lambda raw, spec: (raw, with_step(spec, bits=2))),
        ([quantize(8)], lambda raw, spec: (raw, replace(spec, shape=(64 * 16,)))),
        ([quantize(8)], lambda raw, spec: (raw, replace(spec, shape=(64, 17)))),
        ([quantize(8)], lambda raw, spec: (raw, replace(spec, dtype="int32"))),
        ([quantize(8)], lambda raw, spec: (raw, replace(spec, encoding=spec.encoding * 9))),
    ],
)
def test_what_does_not_fit_is_corrupt(steps: list[dict[str, Any]], change: Any) -> None:
    raw, spec = change(*encoded_block(steps))
    with pytest.raises(CorruptError, match="user@embedding"):
        decode(raw, spec)


def test_what_can_be_told_without_bytes_is_checked_without_them() -> None:
    _, spec = encoded_block([SKIP, ZSTD])
    check_encoding(spec)
    check_encoding(replace(spec, encoding=(), dtype="uint8", shape=spec.stored_shape))
    for wrong in (with_step(spec, rows=65), replace(spec, shape=(2**50,)), replace(spec, stored_itemsize=2)):
        with pytest.raises(CorruptError, match="user@embedding"):
            check_encoding(wrong)


def test_a_frame_must_hold_exactly_the_block() -> None:
    values = torch.arange(4096, dtype=torch.int64)
    encoded = encode(values, [ZSTD])
    spec = spec_of(values, encoded)
    shuffled = zstandard.ZstdDecompressor().decompress(encoded.raw.tobytes())
    frames = [
        zstandard.ZstdCompressor(write_content_size=False).compress(shuffled),
        encoded.raw.tobytes() + b"more",
        encoded.raw.tobytes() + encoded.raw.tobytes(),
        encoded.raw.tobytes()[:-2],
        zstandard.ZstdCompressor().compress(shuffled + b"x"),
        zstandard.ZstdCompressor().compress(bytes(1 << 26)),
    ]
    for frame in frames:
        raw = np.frombuffer(frame, dtype=np.uint8).copy()
        with pytest.raises(CorruptError, match="zstd frame"):
            decode(raw, replace(spec, stored_shape=(len(raw),)))


def test_a_few_bytes_cannot_ask_for_all_memory() -> None:
    """A frame of a gigabyte of zeros, and a bitmap without rows, over the limit that is checked first."""
    size = ENCODED_BYTES_MAX + 4096
    frame = np.frombuffer(zstandard.ZstdCompressor().compress(bytes(size)), dtype=np.uint8).copy()
    empty = torch.zeros(4, 4)
    spec = replace(spec_of(empty, encode(empty, [])), stored_dtype="U8", stored_itemsize=1, dtype="uint8")
    packed = replace(
        spec, shape=(size,), stored_shape=(len(frame),), encoding=({"kind": "zstd", "level": 1, "shuffle": 1},)
    )
    with pytest.raises(CorruptError, match="cannot stand for"):
        decode(frame, packed)
    rows = 1024
    skipped = replace(
        spec, shape=(rows, 1 << 40), stored_shape=(128,), encoding=({"kind": "skip_zero_rows", "rows": 0},)
    )
    with pytest.raises(CorruptError, match="cannot stand for"):
        decode(np.zeros(128, dtype=np.uint8), skipped)


def test_larger_arrays_are_not_encoded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "ENCODED_BYTES_MAX", 4000)
    assert len(encode(torch.zeros(1000), [cast(torch.float16), SKIP, ZSTD]).steps) == 3
    values = torch.zeros(1001)
    encoded = encode(values, [cast(torch.float16), SKIP, ZSTD])
    assert encoded.steps == (cast(torch.float16),)


@pytest.mark.parametrize(
    "step",
    [
        {"kind": "lz4"},
        {"kind": "zstd", "level": 1, "shuffle": 4, "dictionary": 7},
        {"kind": "cast", "dtype": "float3"},
    ],
    ids=str,
)
def test_kinds_of_a_newer_version_are_unsupported(step: dict[str, Any]) -> None:
    raw, spec = encoded_block([ZSTD])
    with pytest.raises(UnsupportedError, match="user@embedding"):
        decode(raw, replace(spec, encoding=(step,)))
    with pytest.raises(UnsupportedError, match="user@embedding"):
        check_encoding(replace(spec, encoding=(step,)))


def test_without_the_package_zstd_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    raw, spec = encoded_block([ZSTD])
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UnsupportedError, match="zstandard"):
        decode(raw, spec)
    with pytest.raises(UnsupportedError, match="zstandard"):
        check_encoding(spec)
    with pytest.raises(UnsupportedError, match="zstandard"):
        encode(torch.zeros(100), [ZSTD])


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([[SKIP], [ZSTD], [SKIP, ZSTD], [quantize(4)], [cast(torch.float16), SKIP], [quantize(8), ZSTD]]),
    st.data(),
)
def test_damaged_blocks_end_in_an_error_or_an_array(steps: list[dict[str, Any]], data: st.DataObject) -> None:
    raw, spec = encoded_block(steps)
    for _ in range(data.draw(st.integers(1, 3))):
        what = data.draw(st.sampled_from(["byte", "length", "step", "shape", "dtype"]))
        if what == "byte":
            raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
        elif what == "length":
            raw = raw[: data.draw(st.integers(1, len(raw)))].copy()
            spec = replace(spec, stored_shape=(len(raw),), stored_itemsize=1, stored_dtype="U8")
        elif what == "step":
            key = data.draw(st.sampled_from(sorted(spec.encoding[0])))
            value = data.draw(st.one_of(st.integers(-1, 70), st.none(), st.sampled_from(["cast", "zstd", "uint8"])))
            spec = with_step(spec, **{key: value})
        elif what == "shape":
            spec = replace(spec, shape=tuple(data.draw(st.lists(st.integers(0, 2**40), max_size=3))))
        else:
            spec = replace(spec, dtype=data.draw(st.sampled_from(["float64", "bool", "complex128", "uint8"])))
    try:
        loaded = decode(raw, spec)
    except CheckpointError:
        return
    assert tuple(loaded.shape) == spec.shape
