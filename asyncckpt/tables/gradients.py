"""Pending gradients, between a backward pass and the optimizer step that applies them to the rows of a table.

1. A forward copies the rows of its distinct ids into a leaf tensor, `[n, dim]`, and computes on that.
2. The backward accumulates into the leaf; the first time, the leaf is added to `pending` of its module.
3. The gradient of a table is one entry: `merged` sums per id what the modules of the table have, in their order and in
   the order of the forwards of each. The sum waits in place of what was summed.
4. An optimizer looks the ids up again (rows may have been removed or assigned to other ids since), updates the rows and
   drops the entry.

A leaf is added in its backward, not in its forward. So a forward without backward leaves nothing behind, and the usual
order forward, zero_grad(), backward, step() loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncckpt.errors import UsageError
from asyncckpt.native import I64
from asyncckpt.signals import uninterrupted
from asyncckpt.tables.row_device import sent

# Far above any gradient accumulation; a training loop without an optimizer step must not eat all memory.
PENDING_FORWARDS_MAX = 4096
# The sum of several forwards comes before any later one.
SUM_INDEX = -1


@dataclass(frozen=True)
class PendingRows:
    """One forward that has a gradient: `leaf.grad`, `[n, dim]`, belongs to ids, int64 [n], distinct and ascending.

    Or the sum of several forwards; then the leaf holds nothing else.
    """

    forward_index: int
    ids: I64
    leaf: torch.Tensor


class PendingGradients:
    """The leaves of one module that have a gradient no optimizer has taken yet."""

    def __init__(self) -> None:
        self._forwards_count = 0
        self._entries: list[PendingRows] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __reduce__(self) -> tuple[type[PendingGradients], tuple[()]]:
        return PendingGradients, ()  # Like the gradients of parameters, they are in no file and no copy.

    def entries(self) -> list[PendingRows]:
        """Return what is pending in the order of the forwards; `leaf.grad` may be changed, for example to clip it."""
        return sorted(self._entries, key=lambda entry: entry.forward_index)

    def watch(self, leaf: torch.Tensor, ids: I64) -> None:
        """Make `leaf` (float [n, dim]) require a gradient, and add it here when it has one."""
        index = self._forwards_count
        self._forwards_count += 1

        def keep(leaf: torch.Tensor) -> None:
            if any(entry.leaf is leaf for entry in self._entries):
                return  # A second backward through the same forward has added to the gradient.
            if len(self._entries) >= PENDING_FORWARDS_MAX:
                what = f"{len(self._entries)} forwards wait for an optimizer"
                raise UsageError(what, hint="call step() or zero_grad() of a sparse optimizer")
            self._entries.append(PendingRows(forward_index=index, ids=ids, leaf=leaf))

        leaf.requires_grad_()
        leaf.register_post_accumulate_grad_hook(keep)  # type: ignore[no-untyped-call]  # torch does not annotate it

    def put(self, entry: PendingRows) -> None:
        """Add a sum."""
        self._entries.append(entry)

    def drop(self) -> None:
        """Drop all gradients."""
        for entry in self._entries:
            entry.leaf.grad = None
        self._entries.clear()


@uninterrupted
def merged(pendings: Sequence[PendingGradients]) -> PendingRows | None:
    """Sum what is pending into one entry, kept by the first of pendings, and return it; None if nothing is."""
    entries = [entry for pending in pendings for entry in pending.entries()]
    found = [(entry.ids, entry.leaf.grad) for entry in entries]
    gradients = [(ids, gradient) for ids, gradient in found if gradient is not None]
    if len(entries) == len(gradients) == 1:
        return entries[0]
    if not gradients:
        return None
    ids, summed = sum_per_id(gradients)
    # Of the shape of its gradient, as torch demands, and without memory for it.
    leaf = summed.new_empty(1).expand(summed.shape)
    leaf.grad = summed
    for pending in pendings:
        pending.drop()
    entry = PendingRows(forward_index=SUM_INDEX, ids=ids, leaf=leaf)
    pendings[0].put(entry)
    return entry


def sum_per_id(gradients: list[tuple[I64, torch.Tensor]]) -> tuple[I64, torch.Tensor]:
    """Sum gradients of the same id in list order; return the distinct ids, ascending, and a gradient row for each.

    The ids of one entry are distinct, so each step below writes a row once: the sum has the same order on every device.
    """
    assert gradients
    if len(gradients) == 1:
        return gradients[0]
    all_ids = np.unique(np.concatenate([ids for ids, _ in gradients]))
    first = gradients[0][1]
    total = torch.zeros((all_ids.size, *first.shape[1:]), dtype=first.dtype, device=first.device)
    for ids, gradient in gradients:
        places = sent(torch.from_numpy(np.searchsorted(all_ids, ids)), total.device)
        total.index_copy_(0, places, total.index_select(0, places) + gradient)
    return all_ids, total
