"""The facts of tensors that a plan depends on: any change is seen, with torch's guards and without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from asyncckpt.plan.leaf_facts import LeafFacts
from asyncckpt.plan.tensor_guards import guards_of

pytestmark = pytest.mark.once


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
    "type": lambda t: t.__setitem__(1, torch.ones(3)),
    "subclass": lambda t: t.__setitem__(0, torch.zeros(4, 6).as_subclass(Marked)),
    "conjugated": lambda t: t.__setitem__(2, torch.zeros(2, dtype=torch.complex64).conj()),
    "negated": lambda t: t.__setitem__(0, torch._neg_view(torch.zeros(4, 6))),
    "layout": lambda t: t.__setitem__(0, torch.zeros(4, 6).to_sparse()),
    "one less": lambda t: t.pop(),
    "one more": lambda t: t.append(torch.zeros(1)),
}


@pytest.mark.parametrize("guarded", [True, False], ids=["guards", "one by one"])
@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_change_is_seen(change: str, guarded: bool) -> None:
    before = tensors()
    facts = LeafFacts.of(before)
    if not guarded:
        facts = replace(facts, guards=None)
    assert facts.hold(before)
    assert facts.hold(tensors()), "other tensors of the same form"
    CHANGES[change](before)
    assert not facts.hold(before)


def test_what_the_guards_refuse_is_compared_one_by_one() -> None:
    before = tensors()
    facts = LeafFacts.of(before)
    assert facts.guards is not None
    before[0].requires_grad_(True)
    assert not facts.guards(*before)
    assert facts.hold(before)
    tied = torch.zeros(3)
    assert guards_of([tied, tied]) is None
    assert LeafFacts.of([tied, tied]).hold([tied, tied])


def test_without_guards_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    facts = LeafFacts.of(tensors())
    assert facts.guards is None
    assert facts.hold(tensors())


def test_guards_hold_no_tensor() -> None:
    import weakref

    before = tensors()
    first = weakref.ref(before[0])
    facts = LeafFacts.of(before)
    before.clear()
    assert facts.guards is not None
    assert first() is None
