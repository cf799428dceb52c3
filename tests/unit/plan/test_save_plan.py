"""The facts of tensors that a plan depends on: any change is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from asyncckpt.plan.save_plan import LeafFacts

pytestmark = pytest.mark.any_core


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
    "nested": lambda t: t.__setitem__(0, torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])),
    "layout": lambda t: t.__setitem__(0, torch.zeros(4, 6).to_sparse()),
    "one less": lambda t: t.pop(),
    "one more": lambda t: t.append(torch.zeros(1)),
}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_change_is_seen(change: str) -> None:
    before = tensors()
    facts = LeafFacts.of(before)
    assert facts.hold(before)
    assert facts.hold(tensors()), "other tensors of the same form"
    CHANGES[change](before)
    assert not facts.hold(before)
