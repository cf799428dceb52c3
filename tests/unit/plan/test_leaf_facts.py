"""The facts of tensors that a plan depends on: any change is seen."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable

import pytest
import torch

from asyncckpt.plan.leaf_facts import LeafFacts


def tensors() -> list[torch.Tensor]:
    return [
        torch.zeros(4, 6),
        torch.nn.Parameter(torch.ones(3)),
        torch.zeros(2, dtype=torch.complex64),
        torch.tensor(5),
        torch.empty(0, 3),
        torch.zeros(4, 6).t(),
    ]


class Marked(torch.Tensor):
    pass


CHANGES: dict[str, Callable[[list[torch.Tensor]], object]] = {
    "shape": lambda t: t.__setitem__(0, torch.zeros(6, 4)),
    "shape in place": lambda t: t[0].resize_(3, 8),
    "shape of nothing": lambda t: t.__setitem__(4, torch.empty(0, 4)),
    "rank": lambda t: t.__setitem__(3, torch.tensor([5])),
    "strides": lambda t: t.__setitem__(0, torch.zeros(6, 4).t()),
    "strides in place": lambda t: t[0].as_strided_((4, 6), (1, 4)),
    "transposed in place": lambda t: t[5].t_(),
    "dtype": lambda t: t.__setitem__(0, torch.zeros(4, 6, dtype=torch.float64)),
    "dtype of data": lambda t: setattr(t[1], "data", torch.ones(3, dtype=torch.bfloat16)),
    "device": lambda t: t.__setitem__(0, torch.zeros(4, 6, device="meta")),
    "subclass": lambda t: t.__setitem__(0, torch.zeros(4, 6).as_subclass(Marked)),
    "conjugated": lambda t: t.__setitem__(2, torch.zeros(2, dtype=torch.complex64).conj()),
    "negated": lambda t: t.__setitem__(0, torch._neg_view(torch.zeros(4, 6))),
    "nested": lambda t: t.__setitem__(0, torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])),
    "layout": lambda t: t.__setitem__(0, torch.zeros(4, 6).to_sparse()),
    "data": lambda t: setattr(t[0], "data", torch.zeros(6, 4)),
    "negated data": lambda t: setattr(t[0], "data", torch._neg_view(torch.zeros(4, 6))),
    "data of other dtype": lambda t: setattr(t[0], "data", torch.zeros(4, 6, dtype=torch.int32)),
    "set": lambda t: t[0].set_(torch.zeros(4, 7)),
    "swapped": lambda t: torch.utils.swap_tensors(t[0], torch.zeros(6, 4)),
    "meta data": lambda t: torch.utils.swap_tensors(t[0], torch.zeros(4, 6, device="meta")),
    "no tensor": lambda t: t.__setitem__(0, None),
    "one less": lambda t: t.pop(),
    "one more": lambda t: t.append(torch.zeros(1)),
}


CHANGES_OF_PLACE: dict[str, Callable[[list[torch.Tensor]], object]] = {
    "nothing": lambda t: None,
    "other tensor": lambda t: t.__setitem__(0, torch.zeros(4, 6)),
    "data": lambda t: setattr(t[0], "data", torch.zeros(4, 6)),
    "data of another's memory": lambda t: setattr(t[0], "data", torch.zeros(100)[50:74].view(4, 6)),
    "set": lambda t: t[0].set_(torch.zeros(4, 6)),
    "offset": lambda t: t[0].set_(torch.zeros(100).untyped_storage(), 8, (4, 6), (6, 1)),
    "swapped": lambda t: torch.utils.swap_tensors(t[0], torch.zeros(4, 6)),
    "freed storage": lambda t: t[0].untyped_storage().resize_(0),
    "shrunk storage": lambda t: t[0].untyped_storage().resize_(8),
    "longer storage": lambda t: t[0].untyped_storage().resize_(1 << 20),
    "resized and back": lambda t: t[0].resize_(1000).resize_(4, 6),
    "gradient": lambda t: t[0].requires_grad_(),
    "no gradient": lambda t: t[1].requires_grad_(False),
    "values": lambda t: t[0].add_(1),
    "shared memory": lambda t: t[0].share_memory_(),
    "no parameter": lambda t: t.__setitem__(1, torch.ones(3)),
    "swapped with a parameter": lambda t: torch.utils.swap_tensors(t[0], torch.nn.Parameter(torch.zeros(4, 6))),
}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_change_is_seen(change: str) -> None:
    before = tensors()
    facts = LeafFacts(before)
    for alike in (before, tensors()):  # The second ones are other tensors of the same form.
        assert facts.places(alike) is not None
    assert "and then the same again" in str(facts.difference(before, str))
    CHANGES[change](before)
    assert facts.places(before) is None
    assert facts.places(before) is None
    if len(before) == len(tensors()):
        assert re.search(r"tensor '\d' has become another one .*found.*expected", str(facts.difference(before, str)))


@pytest.mark.parametrize("change", sorted(CHANGES_OF_PLACE))
def test_places_are_those_of_now(change: str) -> None:
    now = tensors()
    facts = LeafFacts(now)
    CHANGES_OF_PLACE[change](now)
    places = facts.places(now)
    assert places is not None
    storages = [one.untyped_storage() for one in now]
    assert places.addresses.tolist() == [one.data_ptr() for one in now]
    assert places.begins.tolist() == [storage.data_ptr() for storage in storages]
    assert places.bytes.tolist() == [storage.nbytes() for storage in storages]


def test_facts_hold_no_tensor() -> None:
    now = tensors()
    facts = LeafFacts(now)
    assert facts.places(now) is not None
    gone = [weakref.ref(tensor) for tensor in now]
    now.clear()
    assert [tensor() for tensor in gone] == [None] * len(gone)
