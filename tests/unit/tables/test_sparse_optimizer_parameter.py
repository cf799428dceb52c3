"""The parameter of a table: what its gradient is, and that changes of it reach the rows."""

from __future__ import annotations

import pytest
import torch

from asyncckpt.errors import UsageError
from asyncckpt.tables import HashEmbedding, HashTable
from asyncckpt.tables.sparse_optimizer import TableParameter

IDS = torch.tensor([5, -1, 9])


def parameter_of(count: int = 1) -> tuple[TableParameter, list[HashEmbedding]]:
    table = HashTable("user", 2)
    modules = [HashEmbedding(table) for _ in range(count)]
    return TableParameter(table, modules), modules


def test_it_is_a_leaf_that_needs_a_gradient_and_has_no_rows() -> None:
    parameter, _ = parameter_of()
    assert (parameter.is_leaf, parameter.requires_grad, tuple(parameter.shape)) == (True, True, (0, 2))
    assert type(parameter + 1) is torch.Tensor
    assert repr(parameter) == "TableParameter('user', dim=2)"


def test_its_gradient_is_the_sum_over_forwards_and_modules() -> None:
    parameter, (first, second) = parameter_of(2)
    assert parameter.grad is None
    (first(IDS) * 2).sum().backward()
    first(IDS[:1]).sum().backward()
    second(IDS[1:]).sum().backward()
    # Ascending ids: -1, 5, 9.
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
    assert parameter.grad is parameter.grad
    assert (len(first.pending), len(second.pending)) == (1, 0)


def test_changes_in_place_stay_and_later_gradients_are_added() -> None:
    parameter, (module, _) = parameter_of(2)
    module(IDS).sum().backward()
    module(IDS).sum().backward()
    assert parameter.grad is not None
    parameter.grad.mul_(10)
    module(IDS[:1]).sum().backward()
    assert parameter.grad.tolist() == [[20.0, 20.0], [21.0, 21.0], [20.0, 20.0]]


def test_a_second_backward_through_a_summed_forward_counts_once() -> None:
    parameter, (module,) = parameter_of()
    outputs = [module(IDS), module(IDS)]
    for output in outputs:
        output.sum().backward(retain_graph=True)
    assert parameter.grad is not None
    outputs[0].sum().backward()
    assert parameter.grad.tolist() == [[3.0, 3.0]] * 3


def test_none_drops_it_and_another_one_replaces_it() -> None:
    parameter, (module,) = parameter_of()
    module(IDS).sum().backward()
    parameter.grad = torch.full((3, 2), 7.0)
    assert parameter.grad.tolist() == [[7.0, 7.0]] * 3
    with pytest.raises(UsageError, match="gradient of table 'user' must be"):
        parameter.grad = torch.ones(2, 2)
    parameter.grad = None
    assert parameter.grad is None
    assert len(module.pending) == 0
    with pytest.raises(UsageError, match="gradient of table 'user' must be"):
        parameter.grad = torch.ones(3, 2)
