"""Cast numbers to a smaller dtype of their kind: floats to smaller floats, integers to smaller integers.

Floats are rounded to the nearest. Values that would change by more than rounding are refused: numbers beyond the range
of the smaller dtype, and infinities if it has none.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncckpt.format.dtypes import known_dtype
from asyncckpt.format.encodings.form import Form, Malformed, Stage, Unfit, Unknown
from asyncckpt.model.block import EncodingStep

_FLOAT_NAMES = ("float64", "float32", "float16", "bfloat16")
_FLOAT8_NAMES = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_INTEGER_NAMES = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8")
FLOATS = frozenset(getattr(torch, name) for name in (*_FLOAT_NAMES, *_FLOAT8_NAMES) if hasattr(torch, name))
INTEGERS = frozenset(getattr(torch, name) for name in _INTEGER_NAMES if hasattr(torch, name))

_ELEMENTS_AT_ONCE = 1 << 20  # Bounds the memory for the check.


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
