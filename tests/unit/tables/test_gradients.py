"""Pending gradients: which forwards are kept, in which order, and how they are summed."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from asyncckpt.errors import UsageError
from asyncckpt.native import I64
from asyncckpt.tables import HashEmbedding, gradients
from asyncckpt.tables.gradients import sum_per_id

ONE = torch.tensor([1])


def taken(module: HashEmbedding) -> list[tuple[I64, torch.Tensor]]:
    found = [(entry.ids, entry.leaf.grad) for entry in module.pending.entries()]
    module.pending.drop()
    return [(ids, gradient) for ids, gradient in found if gradient is not None]


def test_forwards_come_in_their_order_whatever_the_order_of_backwards() -> None:
    module = HashEmbedding(1)
    outputs = [module(torch.tensor([id])) for id in (5, 3, 4)]
    for output in reversed(outputs):
        output.sum().backward()
    assert [entry.ids.tolist() for entry in module.pending.entries()] == [[5], [3], [4]]
    assert [ids.tolist() for ids, _ in taken(module)] == [[5], [3], [4]]
    assert len(module.pending) == 0


def test_forward_without_backward_leaves_nothing() -> None:
    module = HashEmbedding(1)
    output = module(ONE)
    leaf = weakref.ref(output.grad_fn.next_functions[0][0].variable)
    del output
    gc.collect()
    assert len(module.pending) == 0
    assert leaf() is None


def test_drop_between_forward_and_backward_loses_nothing() -> None:
    module = HashEmbedding(1)
    output = module(ONE)
    module.pending.drop()
    output.sum().backward()
    assert len(module.pending) == 1


def test_second_backward_adds_to_the_same_entry() -> None:
    module = HashEmbedding(1)
    output = module(ONE)
    output.sum().backward(retain_graph=True)
    output.sum().backward(retain_graph=True)
    ((_, gradient),) = taken(module)
    assert gradient.tolist() == [[2.0]]
    output.sum().backward()
    ((_, gradient),) = taken(module)
    assert gradient.tolist() == [[1.0]]


def test_gradients_may_be_clipped_before_the_step() -> None:
    module = HashEmbedding(1)
    (module(ONE) * 10).sum().backward()
    for entry in module.pending.entries():
        assert entry.leaf.grad is not None
        entry.leaf.grad.clamp_(max=1.0)
    ((_, gradient),) = taken(module)
    assert gradient.tolist() == [[1.0]]


def test_pending_forwards_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "PENDING_FORWARDS_MAX", 2)
    module = HashEmbedding(1)
    for _ in range(2):
        module(ONE).sum().backward()
    with pytest.raises(UsageError, match=r"2 forwards wait for an optimizer \(call step\(\) or zero_grad\(\)"):
        module(ONE).sum().backward()
    module.pending.drop()
    module(ONE).sum().backward()
    assert len(module.pending) == 1


def test_sum_per_id_adds_in_list_order() -> None:
    parts = [([1, 5], [2.0**30, 1.0]), ([5], [2.0]), ([1, 9], [-(2.0**30), 3.0]), ([1], [1.0])]
    entries = [(np.array(ids), torch.tensor(values).unsqueeze(1)) for ids, values in parts]
    ids, summed = sum_per_id(entries)
    assert ids.tolist() == [1, 5, 9]
    assert summed.tolist() == [[1.0], [3.0], [3.0]]
    _, reversed_sum = sum_per_id(entries[::-1])
    assert reversed_sum.tolist() == [[0.0], [3.0], [3.0]]
