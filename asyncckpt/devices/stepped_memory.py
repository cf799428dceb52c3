"""The memory that only steps of optimizers change: parameters, and what optimizers keep for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from asyncckpt.native import I64, U64

# Of these by far the most are, so they are asked nothing more.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class SteppedMemory:
    """The memory of tensors that only steps of some optimizers change, as it is now.

    tensors: in the order of their addresses. owners: int64 [n], the number of the optimizer of each.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        found = [(tensor, number) for number, item in enumerate(optimizers) for tensor in _tensors_of(item)]
        places = np.array([(tensor.data_ptr(), tensor.nbytes) for tensor, _ in found], dtype=np.uint64).reshape(-1, 2)
        order = np.lexsort((places[:, 1], places[:, 0]))
        self._begins, self._bytes = places[order, 0], places[order, 1].astype(np.int64)
        self.tensors = [found[number][0] for number in order.tolist()]
        self.owners: I64 = np.array([found[number][1] for number in order.tolist()], dtype=np.int64)
        self._parts = {id(item): self._parts_of(item) for item in optimizers}

    def find(self, begins: U64, bytes: I64) -> I64:
        """Return the number of a tensor that begins where a memory range does and is not shorter; -1: there is none."""
        if not len(self.tensors):
            return np.full(len(begins), -1, dtype=np.int64)
        # The last of those that begin there is the longest.
        found = np.maximum(np.searchsorted(self._begins, begins, side="right") - 1, 0)
        return np.where((self._begins[found] == begins) & (bytes <= self._bytes[found]) & (bytes > 0), found, -1)

    def parts_of(self, optimizer: torch.optim.Optimizer) -> frozenset[int]:
        """Return the numbers of the optimizers whose memory a step of any optimizer changes."""
        known = self._parts.get(id(optimizer))
        return self._parts_of(optimizer) if known is None else known

    def _parts_of(self, optimizer: torch.optim.Optimizer) -> frozenset[int]:
        own = list(_tensors_of(optimizer))
        begins = np.array([tensor.data_ptr() for tensor in own], dtype=np.uint64)
        found = self.find(begins, np.array([tensor.nbytes for tensor in own], dtype=np.int64))
        return frozenset(self.owners[found[found >= 0]].tolist())


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for value in (parameter, *state.values()):
                if type(value) in _PLAIN:
                    yield value
                elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
                    local = getattr(value, "_local_tensor", value)  # What a DTensor holds on this rank.
                    assert isinstance(local, torch.Tensor)
                    yield local
