"""The look at tensors right before they are copied: what is not as planned is refused by name."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from asyncckpt.errors import UsageError
from asyncckpt.plan.dense_blocks import CopyWays
from asyncckpt.plan.leaf_facts import LeafFacts
from asyncckpt.snapshot.capture import look

CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "size": lambda t: setattr(t, "data", torch.zeros(7)),
    "dtype": lambda t: setattr(t, "data", torch.zeros(4, 6, dtype=torch.int32)),
    "strides": lambda t: setattr(t, "data", torch.zeros(6, 4).t()),
    "kind": lambda t: setattr(t, "data", torch._neg_view(torch.zeros(4, 6))),
    "device": lambda t: torch.utils.swap_tensors(t, torch.zeros(4, 6, device="meta")),
    "layout": lambda t: torch.utils.swap_tensors(t, torch.zeros(4, 6).to_sparse()),
    "storage": lambda t: t.untyped_storage().resize_(8),
}


def ways_of(*tensors: torch.Tensor) -> CopyWays:
    return CopyWays.of(tensors, lambda tensor: None)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("planned", [torch.zeros(4, 6), torch.zeros(6, 4).t()], ids=["by address", "by torch"])
def test_what_is_not_as_planned_is_refused_by_name(planned: torch.Tensor, change: str) -> None:
    tensors = [torch.ones(3), planned.detach().clone()]
    facts, ways = LeafFacts(tensors), ways_of(*tensors)
    if change == "strides" and not planned.is_contiguous():
        tensors[1].data = torch.zeros(4, 6)
    else:
        CHANGES[change](tensors[1])
    with pytest.raises(UsageError, match=r"tensor '1' has (become another one|a freed or shrunk storage)"):
        look(tensors, ways, name=str, facts=facts)


def test_what_would_be_read_behind_a_storage_is_refused_whatever_the_tensor_is_now() -> None:
    with pytest.raises(UsageError, match="tensor '0' has got other memory"):
        look([torch.ones(10)], ways_of(torch.ones(1000)), name=str)


def test_memory_is_held_when_a_tensor_gets_another_one() -> None:
    tensor = torch.ones(4096)
    gone = weakref.ref(tensor.untyped_storage())
    live = look([tensor], ways_of(tensor), name=str, facts=LeafFacts([tensor]))
    tensor.data = torch.zeros(4096)
    assert live.storages[0].data_ptr() == int(live.begins[0])
    assert gone() is live.storages[0]
