"""Which tensors in the new state dict of an object come back spread over ranks.

An object that is no module, most often an optimizer, gets new tensors. Whole ones, but

1. where its own state has a spread tensor (DTensor, ShardedTensor, Sharded) of the stored shape and dtype at the same
   path, that one is filled in place, box by box, and given back to it;
2. where it is an optimizer (it has param_groups), and the stored tensor has the shape of its parameter, which is a
   DTensor, a new DTensor of the parameter's mesh and placements is filled: a fresh optimizer over sharded parameters
   gets sharded state. Other state of such a parameter (a step, a factored moment) comes whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.tree import Key, Path
from asyncckpt.plan.contents import StoredDense
from asyncckpt.plan.load_targets import InPlace, Rebuilt, writable


@dataclass(frozen=True)
class SpreadLeaf:
    """A tensor for an object's state dict, and the boxes of it that a load fills."""

    given: Any
    target: InPlace


class ObjectLeaves:
    """Answers for one object, whose state was stored with these values."""

    def __init__(self, item: Rebuilt, values: Mapping[Path, Any]) -> None:
        self._item = item
        self._parameters = dict(_parameters(item, values))

    def find(self, stored: StoredDense) -> SpreadLeaf | None:
        """The spread tensor that a stored one becomes; None: a new whole one."""
        dtype = dtype_by_name(stored.dtype, owner=stored.name).dtype
        own = self._item.spread.get(stored.path)
        if own is not None:
            target = writable(stored.name, stored.path, own)
            if (target.whole_shape, target.dtype) == (stored.shape, dtype):
                return SpreadLeaf(given=own, target=target)
        below = stored.path[len(self._item.path) :]
        parameter = self._parameters.get(below[1]) if len(below) == 3 and below[0] == "state" else None
        if parameter is None or tuple(parameter.shape) != stored.shape:
            return None
        # No communication: an empty tensor like another DTensor has its mesh and placements.
        given = torch.empty_like(parameter.detach(), dtype=dtype)
        return SpreadLeaf(given=given, target=writable(stored.name, stored.path, given))


def _parameters(item: Rebuilt, values: Mapping[Path, Any]) -> Iterator[tuple[Key, Any]]:
    """The DTensor parameters of an optimizer, by the keys under which its stored state has theirs.

    As torch.optim.Optimizer.load_state_dict does it: the stored groups number parameters, and the n-th of all of them
    is the n-th of the optimizer's own.
    """
    groups = getattr(item.owner, "param_groups", None)
    if not isinstance(groups, list):
        return
    own = [parameter for group in groups for parameter in group["params"]]
    numbers = [number for index in range(len(groups)) for number in _stored_list(item, index, values)]
    if len(own) != len(numbers):
        return  # load_state_dict says so better.
    for number, parameter in zip(numbers, own, strict=True):
        if hasattr(parameter, "device_mesh") and hasattr(parameter, "placements"):
            yield (number if isinstance(number, str) else (type(number).__name__, number)), parameter


def _stored_list(item: Rebuilt, group: int, values: Mapping[Path, Any]) -> Iterator[Any]:
    """The numbers of the parameters of a stored group."""
    for index in itertools.count():
        path = (*item.path, "param_groups", ("int", group), "params", ("int", index))
        if path not in values:
            return
        yield values[path]
