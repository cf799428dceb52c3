"""Which rows are evicted by age or count: those whose metadata column is below a bound."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray


def is_below(values: torch.Tensor, below: float) -> NDArray[np.bool_]:
    """Return which of values, `[n]` of any dtype and on any device, are below a number: bool [n] on the CPU.

    Exact, also for large integers, which torch would compare as float32 when the bound is a float.
    """
    values = values.detach().cpu()
    if values.is_floating_point():
        found: NDArray[np.bool_] = (values.double() < _as_float(below)).numpy()
        return found
    if values.dtype is torch.bool:
        values = values.to(torch.int8)
    limits = torch.iinfo(values.dtype)
    if below > limits.max:
        return np.ones(len(values), dtype=np.bool_)
    if below <= limits.min:
        return np.zeros(len(values), dtype=np.bool_)
    # An integer is below 2.5 if it is below 3.
    found = (values < math.ceil(below)).numpy()
    return found


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # An int beyond all floats.
        return math.inf if number > 0 else -math.inf
