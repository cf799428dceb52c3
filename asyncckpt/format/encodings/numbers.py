"""Store floats and integers in fewer bits: cast to a smaller dtype of their kind, or quantized to codes.

A cast rounds floats to the nearest. Values that would change by more than rounding are refused: numbers beyond the
range of the smaller dtype, and infinities if it has none.

Rows of floats are quantized to 8-bit or 4-bit codes with a scale and a bias per row. The layout is that of FBGEMM's
fused rows, so that its kernels can read it:

    8 bits   codes uint8 [n], scale float32, bias float32
    4 bits   codes two to a byte, the first in the low half; scale float16, bias float16

A number is decoded as `code * scale + bias`. The bias is the row's minimum, rounded down to what can be stored. The
scale is 1/255 (1/15) of the range above it, rounded up. So the codes cover the whole row, and every number is at most
half a scale away from its code: `abs(decoded - x) <= scale / 2`, plus the rounding to the array's own dtype.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.format.dtypes import known_dtype
from asyncckpt.format.encodings.form import Form, Malformed, Stage, Unfit, Unknown
from asyncckpt.model.block import EncodingStep

_FLOAT_NAMES = ("float64", "float32", "float16", "bfloat16")
_FLOAT8_NAMES = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_INTEGER_NAMES = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8")
FLOATS = frozenset(getattr(torch, name) for name in (*_FLOAT_NAMES, *_FLOAT8_NAMES) if hasattr(torch, name))
INTEGERS = frozenset(getattr(torch, name) for name in _INTEGER_NAMES if hasattr(torch, name))

_ELEMENTS_AT_ONCE = 1 << 20  # Bounds the memory for checks, and for the arithmetic in float64.


class Cast:
    members = frozenset({"dtype"})

    def misfit(self, form: Form, step: EncodingStep) -> str | None:
        dtype = _target(step)
        if form.stage is not Stage.ARRAY:
            return "its bytes are packed already"
        if not any(form.dtype in kind and dtype in kind for kind in (FLOATS, INTEGERS)):
            return f"{form.dtype} cannot be cast to {dtype}: only float to float, and integer to integer"
        if dtype.itemsize >= form.dtype.itemsize:
            return f"{dtype} is not smaller than {form.dtype}"
        return None

    def encode(self, values: torch.Tensor, form: Form, step: EncodingStep) -> tuple[torch.Tensor, EncodingStep] | None:
        dtype = _target(step)
        flat = values.reshape(-1)
        stored = torch.empty(flat.shape, dtype=dtype, device="cpu")
        check = _check_floats if dtype in FLOATS else _check_integers
        for begin in range(0, len(flat), _ELEMENTS_AT_ONCE):
            part = flat[begin : begin + _ELEMENTS_AT_ONCE]
            wrong = check(part, dtype)
            if wrong is not None:
                index, reason = begin + wrong[0], wrong[1]
                row = index // max(1, form.row_bytes // form.dtype.itemsize) if form.shape else None
                raise Unfit(reason, row=row)
            stored[begin : begin + len(part)] = part.to(dtype)
        return stored.reshape(form.shape), step

    def stored(self, form: Form, step: EncodingStep) -> Form:
        return Form.of(_target(step), form.shape)

    def decode(self, stored: torch.Tensor, form: Form, step: EncodingStep) -> torch.Tensor:
        return stored.to(form.dtype)


def _target(step: EncodingStep) -> torch.dtype:
    name = step["dtype"]
    if type(name) is not str:
        raise Malformed(f"dtype is {name!r}")
    entry = known_dtype(name)
    if entry is None:
        raise Unknown(f"dtype {name!r}")
    return entry.dtype


def _check_floats(values: torch.Tensor, dtype: torch.dtype) -> tuple[int, str] | None:
    """Return the index of the first number that a cast does not only round, and the reason; None without any."""
    wide = values if values.dtype.itemsize >= 4 else values.float()
    greatest = torch.finfo(dtype).max
    low, high = (float(bound) for bound in wide.aminmax())
    if -greatest <= low <= high <= greatest:  # The common case; false if there are NaNs.
        return None
    infinite = torch.isinf(wide)
    lost = torch.where(infinite, wide != values.to(dtype).to(wide.dtype), wide.abs() > greatest)
    if not bool(lost.any()):
        return None
    index = int(lost.nonzero()[0])
    return index, f"{float(wide[index])!r} does not fit {dtype}"


def _check_integers(values: torch.Tensor, dtype: torch.dtype) -> tuple[int, str] | None:
    numbers = values.numpy()  # torch cannot compare most unsigned types.
    bounds = np.iinfo(str(dtype).removeprefix("torch."))
    if bounds.min <= int(numbers.min()) and int(numbers.max()) <= bounds.max:
        return None
    lost = np.array([not bounds.min <= number <= bounds.max for number in numbers.tolist()])
    index = int(lost.argmax())
    return index, f"{numbers[index]} does not fit {dtype}"


# The dtype of scale and bias, by bits.
_PARAMETERS: dict[int, type[np.floating]] = {8: np.float32, 4: np.float16}


class Quantize:
    members = frozenset({"bits"})

    def misfit(self, form: Form, step: EncodingStep) -> str | None:
        bits = _bits(step)
        if form.stage is not Stage.ARRAY:
            return "its bytes are packed already"
        if form.dtype not in FLOATS:
            return f"it needs floats, not {form.dtype}"
        if len(form.shape) < 2 or _row_bytes(_row_length(form), bits) >= form.row_bytes:
            found = "no rows" if len(form.shape) < 2 else f"rows of {form.row_bytes} bytes"
            return f"it has {found}, which would not become smaller"
        return None

    def encode(self, values: torch.Tensor, form: Form, step: EncodingStep) -> tuple[torch.Tensor, EncodingStep] | None:
        bits, length = _bits(step), _row_length(form)
        rows = values.reshape(form.shape[0], length)
        stored = torch.empty((form.shape[0], _row_bytes(length, bits)), dtype=torch.uint8, device="cpu")
        for begin, end in _blocks(form):
            _encode_rows(rows[begin:end], stored[begin:end], bits=bits, first_row=begin)
        return stored, step

    def stored(self, form: Form, step: EncodingStep) -> Form:
        return Form.of(torch.uint8, (form.shape[0], _row_bytes(_row_length(form), _bits(step))))

    def decode(self, stored: torch.Tensor, form: Form, step: EncodingStep) -> torch.Tensor:
        values = torch.empty((form.shape[0], _row_length(form)), dtype=form.dtype, device="cpu")
        for begin, end in _blocks(form):
            _decode_rows(stored[begin:end], values[begin:end], bits=_bits(step))
        return values.reshape(form.shape)


def _bits(step: EncodingStep) -> int:
    bits = step["bits"]
    if type(bits) is not int or bits not in _PARAMETERS:
        raise Malformed(f"bits are {bits!r}, neither 8 nor 4")
    return bits


def _row_length(form: Form) -> int:
    return math.prod(form.shape[1:])


def _code_bytes(length: int, bits: int) -> int:
    return length if bits == 8 else (length + 1) // 2


def _row_bytes(length: int, bits: int) -> int:
    return _code_bytes(length, bits) + 2 * np.dtype(_PARAMETERS[bits]).itemsize


def _blocks(form: Form) -> list[tuple[int, int]]:
    step = max(1, _ELEMENTS_AT_ONCE // max(1, _row_length(form)))
    return [(begin, min(begin + step, form.shape[0])) for begin in range(0, form.shape[0], step)]


def _encode_rows(values: torch.Tensor, stored: torch.Tensor, *, bits: int, first_row: int) -> None:
    wide = values.to(torch.float64, copy=True)  # Changed in place.
    low, high = (bound.numpy() for bound in wide.aminmax(dim=1))
    levels = (1 << bits) - 1
    with np.errstate(over="ignore", invalid="ignore"):
        bias = _rounded(low, _PARAMETERS[bits], -np.inf)
        scale = _rounded((high - bias) / levels, _PARAMETERS[bits], np.inf)
        lost = ~(np.isfinite(bias) & np.isfinite(scale))
    if lost.any():
        row = int(lost.argmax())
        finite = np.isfinite(low[row]) and np.isfinite(high[row])
        reason = f"its numbers are too large for {bits} bits" if finite else "it holds numbers that are not finite"
        raise Unfit(reason, row=first_row + row)
    inverse = np.divide(1.0, scale.astype(np.float64), out=np.zeros(len(scale)), where=scale > 0)
    wide.sub_(torch.from_numpy(bias.astype(np.float64))[:, None]).mul_(torch.from_numpy(inverse)[:, None])
    codes = wide.round_().clamp_(0, levels).to(torch.uint8)
    ends = _code_bytes(values.shape[1], bits)
    stored[:, :ends] = codes if bits == 8 else _paired(codes)
    parameters = np.stack([scale, bias], axis=1) + _PARAMETERS[bits](0)  # No -0.0: rows of zeros are zero bytes.
    stored[:, ends:] = torch.from_numpy(parameters).view(torch.uint8)


def _decode_rows(stored: torch.Tensor, values: torch.Tensor, *, bits: int) -> None:
    ends = _code_bytes(values.shape[1], bits)
    parameters = stored[:, ends:].contiguous().numpy().view(_PARAMETERS[bits]).astype(np.float64)
    scale, bias = (torch.from_numpy(np.ascontiguousarray(column)) for column in parameters.T)
    codes = stored[:, :ends] if bits == 8 else _unpaired(stored[:, :ends], values.shape[1])
    wide = codes.double().mul_(scale[:, None]).add_(bias[:, None])
    # The scale is rounded up, so the highest code may exceed the row's maximum.
    bounds = torch.finfo(values.dtype)
    values.copy_(wide.clamp_(bounds.min, bounds.max))


def _rounded(values: NDArray[np.float64], dtype: type[np.floating], towards: float) -> NDArray[np.floating]:
    """Round values to dtype in the direction of `towards`."""
    rounded = values.astype(dtype)
    beyond = rounded.astype(np.float64) < values if towards > 0 else rounded.astype(np.float64) > values
    rounded[beyond] = np.nextafter(rounded[beyond], dtype(towards))
    return rounded


def _paired(codes: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit codes two to a byte, the first in the low half."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _unpaired(pairs: torch.Tensor, length: int) -> torch.Tensor:
    return torch.stack([pairs & 15, pairs >> 4], dim=2).reshape(len(pairs), -1)[:, :length]
