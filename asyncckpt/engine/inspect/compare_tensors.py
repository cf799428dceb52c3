"""Compare the tensors of two open checkpoints, in windows: neither needs to fit into memory.

Tensors whose blocks have the same digests hold the same bits, and are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from asyncckpt.engine.inspect.numbers_compared import NumbersCompared
from asyncckpt.engine.inspect.stored_values import StoredValues, bits_of, rows_count
from asyncckpt.plan.contents import Contents, StoredDense
from asyncckpt.plan.load_targets import overlap


@dataclass(frozen=True)
class TensorChange:
    """What became of a tensor.

    before, after   its dtype and shape, "float32 [3, 4]"; None where it is not there
    max_abs         the largest absolute difference of two numbers; None for other shapes or dtypes
    cosine          of the angle between all numbers, before and after; None also if one of both is zero
    """

    before: str | None
    after: str | None
    max_abs: float | None = None
    cosine: float | None = None

    @property
    def kind(self) -> str:
        """`"added"`, `"removed"` or `"changed"`."""
        return "added" if self.before is None else "removed" if self.after is None else "changed"


def compare_tensors(
    first: Contents, first_values: StoredValues, second: Contents, second_values: StoredValues
) -> dict[str, TensorChange]:
    """Return the tensors that differ, by name."""
    changes = {}
    for name in {**first.dense, **second.dense}:
        a, b = first.dense.get(name), second.dense.get(name)
        if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
            changes[name] = TensorChange(before=_form(a), after=_form(b))
            continue
        if _digests(a, first_values) == _digests(b, second_values):
            continue
        numbers, differs = NumbersCompared(), False
        for own, other in _pairs(a, first_values, b, second_values):
            differs = differs or not torch.equal(bits_of(own), bits_of(other))
            numbers.add(own, other)
        if differs:
            changes[name] = TensorChange(_form(a), _form(b), numbers.max_abs, numbers.cosine)
    return changes


def _form(tensor: StoredDense | None) -> str | None:
    return None if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _digests(tensor: StoredDense, values: StoredValues) -> set[object]:
    specs = ((values.spec(number), values.digest(number)) for number in tensor.blocks)
    return {(spec.begin, spec.shape, str(spec.encoding), digest) for spec, digest in specs}


def _pairs(
    first: StoredDense, first_values: StoredValues, second: StoredDense, second_values: StoredValues
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return all elements of two tensors of one shape, in boxes; each is [rows, ...] at the same place of both."""
    others = [(number, second_values.spec(number)) for number in second.blocks]
    for number in first.blocks:
        spec = first_values.spec(number)
        count, step = rows_count(spec), first_values.window_rows(number)
        for begin in range(0, count, step):
            own = first_values.range(number, begin, min(begin + step, count))
            if not spec.shape:
                yield own, second_values.range(second.blocks[0], 0, 1)
                continue
            place = (spec.begin[0] + begin, *spec.begin[1:])
            for other, other_spec in others:
                shared = overlap(place, own.shape, other_spec.begin, other_spec.shape)
                if shared is None:
                    continue
                top = shared.second_begin[0]
                theirs = second_values.range(other, top, top + shared.shape[0])
                yield (
                    _box(own, shared.first_begin, shared.shape),
                    _box(theirs, (0, *shared.second_begin[1:]), shared.shape),
                )


def _box(values: torch.Tensor, begin: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    return values[tuple(slice(low, low + size) for low, size in zip(begin, shape, strict=True))]
