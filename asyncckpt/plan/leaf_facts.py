"""The facts of leaves: everything that the image depends on, and everything that makes a raw copy safe.

Kind, dtype, shape, strides, device, layout, conjugate and negative bits. The core compares them in one call and says
where the tensors are (native/torch_calls.py). What it does not know, or sees otherwise, is compared by torch, one call
for each fact of each tensor: so the core saves time, and never decides alone that something has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, eq
from typing import Any

import numpy as np
import torch

from asyncckpt.errors import UsageError
from asyncckpt.native.tensors import PLACE, Places
from asyncckpt.native.torch_calls import KnownTensors
from asyncckpt.plan.leaf_memory import check_leaf, is_transformed
from asyncckpt.plan.state import PLAIN_TENSORS, still

_FORMS_MAX = 4
_kind = attrgetter("dtype", "is_cpu", "layout")
_Reader = Callable[[torch.Tensor], Any]


class LeafFacts:
    """Facts of tensors: their types, and with the function that reads it each other fact. Holds no tensor.

    A parameter, a buffer and a tensor are of one type here: what is stored of them is the same.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Read the facts of tensors that passed check_leaf, and that nobody changes meanwhile."""
        read: list[_Reader] = [torch.Tensor.size, _kind, torch.Tensor.stride, torch.Tensor.is_neg, is_transformed]
        if not all(tensor.is_cpu for tensor in tensors):
            read.append(torch.Tensor.get_device)
        if any(tensor.dtype.is_complex for tensor in tensors):
            read.append(torch.Tensor.is_conj)
        self._types = list(map(_type, tensors))
        self._facts = tuple((read_fact, list(map(read_fact, tensors))) for read_fact in read)
        self._known = KnownTensors.of(tensors)
        self._forms: dict[tuple[type, ...], KnownTensors] = {}  # By their exact types.

    def places(self, tensors: Sequence[torch.Tensor]) -> Places | None:
        """Return where tensors are that have these facts, both as of one moment; None: one has others."""
        known = self._form(tuple(map(type, tensors)))
        places = None if known is None else known.places(tensors)
        if places is not None:
            return places
        seen = list(map(still, tensors))  # Nobody else can change these from one fact to the next.
        if not self._hold(seen):
            return None
        if self._known is not None:  # What the core sees beside them has changed, such as an inference tensor.
            self._known = KnownTensors.of(seen)
            self._forms.clear()
        return read_places(seen)

    def difference(self, tensors: Sequence[torch.Tensor], name: Callable[[int], str]) -> UsageError:
        """Return the error for tensors that do not have these facts any more, or had others for a moment."""
        number = next((number for number in range(len(tensors)) if not self._holds(number, tensors[number])), None)
        if number is None:
            for number, tensor in enumerate(tensors):
                check_leaf(tensor, name(number))
                if tensor.numel() and not _address(tensor):
                    return without_memory(name(number))
            return changed("tensors of the state have become others", found="those of the plan, but not all the time")
        sizes, kinds, strides, *_ = (facts for _, facts in self._facts)
        expected = f"{kinds[number][0]} {tuple(sizes[number])}, strides {strides[number]}"
        what = f"tensor {name(number)!r} has become another one"
        return changed(what, found=_described(tensors[number]), expected=expected)

    def _form(self, types: tuple[type, ...]) -> KnownTensors | None:
        """Return what the core knows of these tensors, if they were of these types; None: nothing."""
        if types not in self._forms and self._known is not None:
            if len(types) != len(self._types) or not all(map(_is_of, types, self._types)):
                return None
            if len(self._forms) >= _FORMS_MAX:
                self._forms.clear()
            self._forms[types] = self._known.of_types(types)
        return self._forms.get(types)

    def _hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether these are the facts of tensors, by torch.

        Compared one by one and let go: thousands of tuples kept alive at once would start a full garbage collection.
        """
        if len(tensors) != len(self._types) or not all(map(eq, map(_type, tensors), self._types)):
            return False
        try:
            return all(all(map(eq, map(read_fact, tensors), known)) for read_fact, known in self._facts)
        except (RuntimeError, ValueError):  # One is of a kind now that has no sizes or strides.
            return False

    def _holds(self, number: int, tensor: torch.Tensor) -> bool:
        try:
            return _type(tensor) is self._types[number] and all(
                read_fact(tensor) == known[number] for read_fact, known in self._facts
            )
        except (RuntimeError, ValueError):
            return False


def changed(what: str, **facts: str) -> UsageError:
    """Return the error for what was changed while a save waited."""
    return UsageError(
        f"{what} while the call of a save waited",
        **facts,
        hint="let no signal handler and no other thread change their dtype, shape, device or memory meanwhile",
    )


def without_memory(name: str) -> UsageError:
    return UsageError(f"tensor {name!r} has no memory", hint="it stands for values that torch has not made")


def read_places(tensors: Sequence[torch.Tensor]) -> Places:
    """Return where tensors are, by torch; the address of one that has none is 0."""
    places = np.zeros(len(tensors), dtype=PLACE)
    places["address"] = list(map(_address, tensors))
    places["offset"] = list(map(torch.Tensor.storage_offset, tensors))
    places["storage_bytes"] = [tensor.untyped_storage().nbytes() for tensor in tensors]
    return places


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _type(tensor: torch.Tensor) -> type:
    kind = type(tensor)
    return torch.Tensor if kind in PLAIN_TENSORS else kind


def _is_of(kind: type, known: type) -> bool:
    return kind is known or (known is torch.Tensor and kind in PLAIN_TENSORS)


def _described(tensor: torch.Tensor) -> str:
    try:
        kind = _type(tensor).__name__
        return f"{tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}, {kind}"
    except (AttributeError, RuntimeError, ValueError):
        return f"a {type(tensor).__name__} without sizes or strides"
