"""How far numbers are apart: the largest difference, and the cosine of the angle between them."""

from __future__ import annotations

import math

import torch


class NumbersCompared:
    """Sums over pairs of arrays, in float64; of complex numbers over both of their parts.

    What torch cannot convert to float64 is compared by its bits alone: max_abs and cosine are None then.
    """

    def __init__(self) -> None:
        self._max_abs: float | None = 0.0
        self._products = torch.zeros(3, dtype=torch.float64, device="cpu")

    def add(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Take two arrays of the same shape and dtype into account."""
        if self._max_abs is None or not first.numel():
            return
        try:
            a, b = _float64(first), _float64(second)
        except (RuntimeError, NotImplementedError, TypeError):
            self._max_abs = None
            return
        same = (a == b) | (a.isnan() & b.isnan())
        farthest = torch.where(same, 0.0, (a - b).abs()).max().item()
        self._max_abs = max(self._max_abs, farthest) if farthest == farthest else math.nan
        self._products += torch.stack([a @ b, a @ a, b @ b])

    @property
    def max_abs(self) -> float | None:
        """The largest absolute difference; nan where a number became nan or ceased to be it."""
        return self._max_abs

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between all numbers as two vectors; None where one of them is zero."""
        both, first, second = self._products.tolist()
        if self._max_abs is None or not first or not second:
            return None
        return both / math.sqrt(first) / math.sqrt(second) if first == first and second == second else math.nan


def _float64(values: torch.Tensor) -> torch.Tensor:
    if values.is_complex():
        values = torch.view_as_real(values.to(torch.complex128))
    return values.reshape(-1).to(torch.float64)
