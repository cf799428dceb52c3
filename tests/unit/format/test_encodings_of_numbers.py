"""Casts and quantized rows: within their bounds, in their layouts, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.format.encodings import (
    Unfit,
    encode,
    misfit,
)
from asyncckpt.format.encodings import numbers as of_numbers
from asyncckpt.format.encodings.numbers import FLOATS, INTEGERS
from tests.unit.format.encoded import SKIP, ZSTD, cast, quantize, round_trip
from tests.worlds.bits import raw_of

# -- cast --------------------------------------------------------------------------------------------------------------

PAIRS = [(a, b) for kind in (FLOATS, INTEGERS) for a in kind for b in kind if b.itemsize < a.itemsize]


def test_a_cast_rounds_as_torch_does() -> None:
    for source, target in PAIRS:
        values = torch.randint(0, 127, (20, 3), generator=torch.Generator().manual_seed(1)).to(source)
        if source in FLOATS:
            values = (values.double() / 64).to(source)
        encoded = encode(values, [cast(target)])
        assert raw_of(round_trip(values, [cast(target)])) == raw_of(values.to(target).to(source))
        assert encoded.stored.shape == (20, 3)
        assert encoded.raw.nbytes == 60 * target.itemsize
        round_trip(values[:0], [cast(target)])
        round_trip(values[0, 0].clone(), [cast(target)])


@pytest.mark.parametrize(
    ("target", "relative", "absolute"),
    [
        (torch.float16, 2**-11, 2**-25),
        (torch.bfloat16, 2**-8, 2**-134),
        (torch.float8_e4m3fn, 2**-4, 2**-10),
        (torch.float8_e5m2, 2**-3, 2**-17),
    ],
    ids=str,
)
def test_a_cast_is_as_near_as_the_page_says(target: torch.dtype, relative: float, absolute: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4000, generator=generator, dtype=torch.float64)
    values *= torch.tensor(10.0).pow(torch.linspace(-12, 2, 4000, dtype=torch.float64))
    loaded = round_trip(values, [cast(target)])
    assert bool(((loaded - values).abs() <= torch.clamp_min(values.abs() * relative, absolute)).all())


def test_a_cast_keeps_what_is_not_finite() -> None:
    values = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0])
    loaded = round_trip(values, [cast(torch.bfloat16)])
    assert torch.equal(loaded.nan_to_num(7.0, posinf=9.0, neginf=-9.0), torch.tensor([9.0, -9.0, 7.0, -0.0]))
    assert torch.signbit(loaded[3])


@pytest.mark.parametrize(
    ("source", "target", "value"),
    [
        (torch.float32, torch.float16, 1e5),
        (torch.float32, torch.bfloat16, 3.4e38),
        (torch.float64, torch.float32, 1e300),
        (torch.float32, torch.float8_e4m3fn, 1e4),
        (torch.float32, torch.float8_e4m3fn, float("inf")),
        (torch.float32, torch.float8_e5m2fnuz, float("-inf")),
        (torch.bfloat16, torch.float8_e5m2, 1e30),
        (torch.int64, torch.int32, 2**31),
        (torch.int64, torch.uint16, -1),
        (torch.uint32, torch.int16, 2**15),
        (torch.int32, torch.int8, -129),
    ],
    ids=str,
)
def test_a_cast_that_would_do_more_than_round_names_the_row(
    source: torch.dtype, target: torch.dtype, value: float
) -> None:
    values = torch.zeros(9, 5, dtype=torch.float64 if source in FLOATS else torch.int64)
    values[6, 2] = value
    with pytest.raises(Unfit, match="does not fit torch") as caught:
        encode(values.to(source), [cast(target)])
    assert caught.value.row == 6


@pytest.mark.parametrize(
    ("dtype", "step"),
    [
        (torch.float16, cast(torch.bfloat16)),
        (torch.float32, cast(torch.float64)),
        (torch.float32, cast(torch.int8)),
        (torch.int64, cast(torch.float16)),
        (torch.bool, cast(torch.uint8)),
        (torch.complex64, cast(torch.float32)),
        (torch.int64, quantize(8)),
        (torch.float8_e5m2, quantize(8)),
    ],
    ids=str,
)
def test_steps_that_make_no_sense_are_told(dtype: torch.dtype, step: dict[str, Any]) -> None:
    assert misfit(dtype, (1, 16), [step]) is not None
    with pytest.raises(Unfit):
        encode(torch.zeros(4, 16).to(dtype), [step])


def test_steps_out_of_order_are_told() -> None:
    for steps in ([SKIP, cast(torch.float16)], [ZSTD, SKIP], [SKIP, quantize(8)], [SKIP, SKIP], [ZSTD, ZSTD]):
        assert misfit(torch.float32, (1, 64), steps) is not None


# -- quantize ----------------------------------------------------------------------------------------------------------


def bound_of(values: torch.Tensor, bits: int) -> torch.Tensor:
    """The bound that filters.quantize states, per row, and half a unit of the dtype for the rounding to it."""
    wide = values.double()
    low, high = wide.amin(1), wide.amax(1)
    rounding = wide.abs().amax(1) * torch.finfo(values.dtype).eps
    if bits == 8:
        return (high - low + low.abs() * 2.0**-23) / 509 + rounding + 2.0**-149
    return torch.clamp_min((high - low + low.abs() * 2.0**-10) / 29, 2.0**-24) + rounding


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 6e4])
def test_quantized_rows_come_back_within_the_bound(bits: int, dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(bits)
    values = torch.rand(300, 33, generator=generator, dtype=torch.float64) * 2 - 1
    values[:100] += 3  # Rows far from zero: the bias is rounded, too.
    values[100:110] = values[100:110, :1]
    values[110] = 0
    values = (values / 4 * scale).to(dtype)
    loaded = round_trip(values, [quantize(bits)])
    assert bool(((loaded.double() - values.double()).abs().amax(1) <= bound_of(values, bits)).all())


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-65000, 65000, width=32), min_size=12, max_size=24),
    st.sampled_from([8, 4]),
    st.sampled_from([torch.float32, torch.float16, torch.float64]),
)
def test_any_row_comes_back_within_the_bound(row: list[float], bits: int, dtype: torch.dtype) -> None:
    values = torch.tensor([row], dtype=torch.float64).to(dtype)
    if misfit(dtype, tuple(values.shape), [quantize(bits)]) is not None:
        return
    loaded = round_trip(values, [quantize(bits)])
    assert bool(((loaded.double() - values.double()).abs().amax(1) <= bound_of(values, bits)).all())


def test_rows_of_zeros_are_zero_bytes_when_quantized() -> None:
    values = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    values[::2] = 0.0
    values[1] = -0.0
    encoded = encode(values, [quantize(8), SKIP])
    assert encoded.steps[1] == {"kind": "skip_zero_rows", "rows": 31}


def test_8_bit_rows_have_the_layout_of_fused_rows() -> None:
    values = torch.tensor([[0.0, 255.0, 100.25, 7.0, 3.0, 2.0, 1.0, 9.0, 11.0], [-1.0] * 9])
    raw = encode(values, [quantize(8)]).raw.reshape(2, 17)
    assert raw[0, :9].tolist() == [0, 255, 100, 7, 3, 2, 1, 9, 11]
    assert raw[:, 9:].copy().view(np.float32).tolist() == [[1.0, 0.0], [0.0, -1.0]]


def test_4_bit_rows_have_the_layout_of_fused_rows() -> None:
    values = torch.tensor([[2.0, 17.0, 3.0, 4.0, 16.0]])
    encoded = encode(values, [quantize(4)])
    assert encoded.stored.shape == (1, 7)
    assert encoded.raw[:3].tolist() == [0xF0, 0x21, 0x0E]  # The first of two in the low half.
    assert encoded.raw[3:].copy().view(np.float16).tolist() == [1.0, 2.0]
    assert torch.equal(round_trip(values, [quantize(4)]), values)


@pytest.mark.parametrize(
    ("bits", "value", "reason"),
    [
        (8, float("nan"), "not finite"),
        (8, float("-inf"), "not finite"),
        (4, float("inf"), "not finite"),
        (4, -70000.0, "too large"),
        (4, 2e6, "too large"),
        (8, -1e300, "too large"),
    ],
)
def test_rows_that_cannot_be_quantized_are_named(bits: int, value: float, reason: str) -> None:
    values = torch.zeros(9, 16, dtype=torch.float64)
    values[6, 2] = value
    with pytest.raises(Unfit, match=reason) as caught:
        encode(values, [quantize(bits)])
    assert caught.value.row == 6


def test_the_greatest_float16_does_not_become_infinite() -> None:
    values = torch.full((1, 32), 65504.0, dtype=torch.float16)
    values[0, 0] = 0.0
    assert bool(torch.isfinite(round_trip(values, [quantize(4)])).all())


def test_more_rows_than_one_window_of_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_numbers, "_ELEMENTS_AT_ONCE", 100)
    values = torch.rand(203, 17, generator=torch.Generator().manual_seed(3))
    loaded = round_trip(values, [quantize(8)])
    assert bool(((loaded - values).abs().double().amax(1) <= bound_of(values, 8)).all())
    values[202, 3] = float("nan")
    with pytest.raises(Unfit) as caught:
        encode(values, [quantize(8)])
    assert caught.value.row == 202
