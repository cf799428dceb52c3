"""Which rows are evicted by age or count: those whose metadata column is below a bound.

Age is counted from the newest number of the column itself. So a step that somebody forgot to set, and a clock that
stands still or goes back, make no other row old; but one stamp far ahead makes all others old. A row that holds the
initial value of the column was never stamped, and has no age.
"""

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


def is_unset(values: torch.Tensor, fill: float) -> NDArray[np.bool_]:
    """Return which of values, `[n]`, are the initial value of their column: bool [n] on the CPU."""
    values = values.detach().cpu()
    found: NDArray[np.bool_] = (values == torch.full((), fill, dtype=values.dtype, device="cpu")).numpy()
    return found


def is_older(values: torch.Tensor, age: float, *, fill: float) -> NDArray[np.bool_]:
    """Return which of values, `[n]`, are set, and lower than the newest one by more than an age: bool [n]."""
    values = values.detach().cpu()
    is_set: NDArray[np.bool_] = ~is_unset(values, fill) & torch.isfinite(values).numpy()
    if not is_set.any():
        return is_set
    newest = values[torch.from_numpy(is_set)].max().item()
    # Integers are subtracted as integers: a float has no room for stamps above 2**53.
    is_exact = isinstance(newest, int) and age != math.inf
    older: NDArray[np.bool_] = is_set & is_below(values, newest - (math.floor(age) if is_exact else _as_float(age)))
    return older


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # An int beyond all floats.
        return math.inf if number > 0 else -math.inf
