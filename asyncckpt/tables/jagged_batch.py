"""Batches of features with any number of ids per sample, split into features and checked.

A batch is a KeyedJaggedTensor of TorchRec, recognized by its methods (`keys()`, and items with `values()`, `lengths()`
and `weights_or_none()`), or a mapping of feature name to (values, offsets):

    values   int64 [n], the ids of all samples, one after the other
    offsets  int64 or int32 [batch + 1], where each sample begins; the first is 0, the last n
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from asyncckpt.errors import UsageError, must_be

OFFSET_DTYPES = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Feature:
    """The ids of one feature: values int64 [n], offsets int64 [batch + 1] on the CPU, weights [n] if requested."""

    values: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None


def feature_of(batch: Any, name: str, *, weighted: bool) -> Feature:
    """Return one feature of a batch, checked. Raises UsageError."""
    if not callable(getattr(batch, "keys", None)) or not hasattr(batch, "__getitem__"):
        rule = "a KeyedJaggedTensor, or a mapping of feature to (values, offsets)"
        raise must_be("batch of a collection", rule, type(batch))
    known = list(batch.keys())
    if name not in known:
        raise UsageError(f"batch lacks feature {name!r}", found=known)
    item = batch[name]
    if callable(getattr(item, "lengths", None)) and callable(getattr(item, "values", None)):
        return _from_jagged_tensor(item, name, weighted=weighted)
    if weighted:
        raise UsageError(f"feature {name!r} has no weights", expected="a KeyedJaggedTensor with weights")
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise must_be(f"feature {name!r}", "(values, offsets)", type(item))
    values, offsets = item
    return Feature(values=_checked_values(values, name), offsets=_checked_offsets(offsets, values, name), weights=None)


def _from_jagged_tensor(item: Any, name: str, *, weighted: bool) -> Feature:
    """Convert a JaggedTensor. Uses its lengths: the offsets of a view into a larger one need not begin at 0."""
    values = _checked_values(item.values(), name)
    offsets = torch.zeros(len(item.lengths()) + 1, dtype=torch.int64, device="cpu")
    offsets[1:] = item.lengths().cpu().to(torch.int64).cumsum(0)
    weights = item.weights_or_none() if weighted else None
    if weighted and weights is None:
        raise UsageError(f"feature {name!r} has no weights", expected="a KeyedJaggedTensor with weights")
    return Feature(values=values, offsets=_checked_offsets(offsets, values, name), weights=weights)


def _checked_values(values: object, name: str) -> torch.Tensor:
    if not isinstance(values, torch.Tensor) or values.dim() != 1:
        found = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values)
        raise must_be(f"values of feature {name!r}", "an int64 tensor [n]", found)
    if values.dtype is not torch.int64:
        # Features of a table are concatenated, which would silently convert other dtypes to int64.
        what = f"values of feature {name!r} have the wrong dtype"
        raise UsageError(what, found=values.dtype, expected=torch.int64, hint="use values.long() if they are ids")
    return values


def _checked_offsets(offsets: object, values: torch.Tensor, name: str) -> torch.Tensor:
    what = f"offsets of feature {name!r}"
    if not isinstance(offsets, torch.Tensor) or offsets.dtype not in OFFSET_DTYPES or offsets.dim() != 1:
        found = (offsets.dtype, tuple(offsets.shape)) if isinstance(offsets, torch.Tensor) else type(offsets)
        raise must_be(what, "an int64 or int32 tensor [batch + 1]", found)
    offsets = offsets.detach().cpu().to(torch.int64)
    ends = (int(offsets[0]), int(offsets[-1])) if len(offsets) else None
    if ends != (0, len(values)) or bool((offsets[1:] < offsets[:-1]).any()):
        rule = f"one more than samples, ascending from 0 to {len(values)}, the number of values"
        raise must_be(what, rule, offsets[:16].tolist())
    return offsets


def joined_offsets(parts: list[Feature]) -> torch.Tensor:
    """Return the offsets of several features one after the other, int64 [all samples + 1]."""
    lengths = [part.offsets.diff() for part in parts]
    return torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), *lengths]).cumsum(0)


def joined_weights(parts: list[Feature]) -> torch.Tensor:
    return torch.cat([part.weights for part in parts if part.weights is not None])
