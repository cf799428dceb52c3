"""The rules by which optimizers update rows, as formulas of arrays: NumPy's or torch's, on any device.

They are those of csrc/include/asyncckpt.h, operation by operation: what is computed in float32 has the same bits there,
in the twin, and where torch computes it on a device that rounds every operation. So no formula here uses an operation
that may be fused or that divides by a scalar, which some devices turn into a multiplication.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any


class Rule(IntEnum):
    """ac_rule; see asyncckpt.h for the numbers and slots of each."""

    SGD = 0
    ADAGRAD = 1
    ADAM = 2
    FTRL = 3

    @property
    def numbers_count(self) -> int:
        return (4, 3, 8, 3)[self]

    @property
    def has_rowwise(self) -> bool:
        """Whether the last slot may have one number a row."""
        return self in (Rule.ADAGRAD, Rule.ADAM)

    def slots_count(self, numbers: Sequence[float]) -> int:
        if self is Rule.SGD:
            return 1 if numbers[2] else 0
        return 1 if self is Rule.ADAGRAD else 2


def new_values(
    xp: Any, rule: Rule, numbers: Sequence[float], *, gradient: Any, weight: Any, slots: Sequence[Any], rowwise: bool
) -> tuple[Any, ...]:
    """Return the new (weight, *slots) of rows, arrays [n, dim] of one floating-point type.

    xp: the module `numpy`, or what has its `sqrt`, `where`, `full_like`, `ones_like` and `hstack` for other arrays.
    rowwise: the last slot is [n].
    """
    formula = {Rule.SGD: _sgd, Rule.ADAGRAD: _adagrad, Rule.ADAM: _adam, Rule.FTRL: _ftrl}[rule]
    return formula(xp, numbers, gradient, weight, slots, rowwise)


def _decayed(gradient: Any, weight: Any, weight_decay: float) -> Any:
    return gradient + weight_decay * weight if weight_decay else gradient


def _sgd(
    xp: Any, numbers: Sequence[float], gradient: Any, weight: Any, slots: Sequence[Any], rowwise: bool
) -> tuple[Any, ...]:
    lr, weight_decay, momentum, nesterov = numbers
    d = _decayed(gradient, weight, weight_decay)
    if not momentum:
        return (weight - lr * d,)
    first = momentum * slots[0] + d
    return weight - lr * (d + momentum * first if nesterov else first), first


def _adagrad(
    xp: Any, numbers: Sequence[float], gradient: Any, weight: Any, slots: Sequence[Any], rowwise: bool
) -> tuple[Any, ...]:
    lr, weight_decay, eps = numbers
    d = _decayed(gradient, weight, weight_decay)
    if rowwise:
        total = slots[0] + _mean_square(xp, d)
        return weight - _quotient(xp, lr, xp.sqrt(total) + eps)[:, None] * d, total
    total = slots[0] + d * d
    return weight - lr * d / (xp.sqrt(total) + eps), total


def _adam(
    xp: Any, numbers: Sequence[float], gradient: Any, weight: Any, slots: Sequence[Any], rowwise: bool
) -> tuple[Any, ...]:
    step, weight_decay, kept, rest1, beta2, rest2, scale, eps = numbers
    if kept != 1:
        weight = kept * weight
    d = _decayed(gradient, weight, weight_decay)
    first = slots[0] + rest1 * (d - slots[0])
    if rowwise:
        second = beta2 * slots[1] + rest2 * _mean_square(xp, d)
        return weight - _quotient(xp, step, xp.sqrt(second) * scale + eps)[:, None] * first, first, second
    second = beta2 * slots[1] + rest2 * d * d
    return weight - step * first / (xp.sqrt(second) * scale + eps), first, second


def _ftrl(
    xp: Any, numbers: Sequence[float], gradient: Any, weight: Any, slots: Sequence[Any], rowwise: bool
) -> tuple[Any, ...]:
    inverse_lr, l1, l2 = numbers
    total = slots[0] + gradient * gradient
    root = xp.sqrt(total)
    z = slots[1] + gradient - (root - xp.sqrt(slots[0])) * inverse_lr * weight
    q = root * inverse_lr + l2
    clipped = xp.where(z > l1, xp.full_like(z, l1), xp.where(z < -l1, xp.full_like(z, -l1), z))
    # Where no gradient has come yet there is nothing to divide by, and the weight stays what it was.
    moves = q > 0
    moved = (clipped - z) / xp.where(moves, q, xp.ones_like(q))
    return xp.where(moves, moved, weight), total, z


def _quotient(xp: Any, number: float, divisor: Any) -> Any:
    return xp.full_like(divisor, number) / divisor


def _mean_square(xp: Any, d: Any) -> Any:
    """Return the mean square of every row, [n], added in the order of asyncckpt.h."""
    squares = d * d
    dim = squares.shape[1]
    total = squares[:, :16]
    for begin in range(16, dim, 16):
        total = _added(xp, total, squares[:, begin : begin + 16])
    for half in (8, 4, 2, 1):
        total = _added(xp, total[:, :half], total[:, half:])
    # The multiplication rounds 1 / dim to the type of the array.
    return total[:, 0] * (1.0 / dim)


def _added(xp: Any, left: Any, right: Any) -> Any:
    """Return left + right; right may have fewer columns."""
    count = right.shape[1]
    if count == left.shape[1]:
        return left + right
    return xp.hstack((left[:, :count] + right, left[:, count:]))
