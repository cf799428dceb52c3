"""The facts of leaves: everything that the image depends on, and everything that makes a raw copy safe.

Type, dtype, shape, strides, device, layout, conjugate and negative bits. The core compares them in one call and says
where the tensors are (native/torch_calls.py). What it does not know, or sees otherwise, is compared by torch, one call
for each fact of each tensor: so the core saves time, and never decides alone that something has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, eq, is_
from typing import Any

import torch

from asyncckpt.native.tensors import Places
from asyncckpt.native.torch_calls import KnownTensors
from asyncckpt.plan.leaf_checks import is_transformed

_kind = attrgetter("dtype", "is_cpu", "layout")
_Reader = Callable[[torch.Tensor], Any]


class LeafFacts:
    """Facts of tensors: their types, and with the function that reads it each other fact. Holds no tensor."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Read the facts of tensors that passed check_leaf."""
        read: list[_Reader] = [torch.Tensor.size, _kind, torch.Tensor.stride, torch.Tensor.is_neg, is_transformed]
        if not all(tensor.is_cpu for tensor in tensors):
            read.append(torch.Tensor.get_device)
        if any(tensor.dtype.is_complex for tensor in tensors):
            read.append(torch.Tensor.is_conj)
        self._types = list(map(type, tensors))
        self._facts = tuple((read_fact, list(map(read_fact, tensors))) for read_fact in read)
        self._known = KnownTensors.of(tensors)

    def places(self, tensors: Sequence[torch.Tensor]) -> Places | None:
        """Return where tensors are that have these facts; None: by another way than the core's it has to be seen."""
        return None if self._known is None else self._known.places(tensors)

    def hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether these are the facts of tensors, by torch.

        Compared one by one and let go: thousands of tuples kept alive at once would start a full garbage collection.
        """
        if len(tensors) != len(self._types) or not all(map(is_, map(type, tensors), self._types)):
            return False
        try:
            holds = all(all(map(eq, map(read_fact, tensors), known)) for read_fact, known in self._facts)
        except (RuntimeError, ValueError):  # One is of a kind now that has no sizes or strides.
            return False
        if (
            holds and self._known is not None
        ):  # What the core sees beside them has changed, such as an inference tensor.
            self._known = KnownTensors.of(tensors)
        return holds
