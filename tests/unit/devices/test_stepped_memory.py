"""Which memory only steps of optimizers change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from asyncckpt.devices import stepped_memory
from asyncckpt.devices.stepped_memory import Places, SteppedMemory, places_of
from asyncckpt.native import I64


def read(*optimizers: torch.optim.Optimizer) -> SteppedMemory:
    """Return their memory, which somebody has asked for."""
    memory = SteppedMemory(optimizers)
    found(memory, torch.ones(1))
    return memory


def found(memory: SteppedMemory, *tensors: torch.Tensor) -> I64:
    begins = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)
    return memory.find(begins, np.array([tensor.nbytes for tensor in tensors], dtype=np.int64))


def test_parameters_and_state_are_found_and_nothing_else() -> None:
    first, second = torch.nn.Parameter(torch.ones(6)), torch.nn.Parameter(torch.ones(4))
    optimizers = [torch.optim.SGD([first], momentum=0.5), torch.optim.SGD([second])]
    first.grad = torch.ones(6)
    optimizers[0].step()
    momentum = optimizers[0].state[first]["momentum_buffer"]
    memory = SteppedMemory(optimizers)
    numbers = found(memory, first, momentum, second, first[:3], first[1:], torch.ones(6))
    assert (numbers >= 0).tolist() == [True, True, True, True, False, False]
    assert memory.owners[numbers[:4]].tolist() == [0, 0, 1, 0]
    assert memory.tensors[numbers[1]] is momentum


def test_longer_memory_is_not_the_parameters() -> None:
    whole = torch.ones(6)
    memory = SteppedMemory([torch.optim.SGD([torch.nn.Parameter(whole[:4])])])
    assert found(memory, whole).tolist() == [-1]


def test_an_optimizer_is_known_by_its_memory() -> None:
    shared, own = torch.nn.Parameter(torch.ones(6)), torch.nn.Parameter(torch.ones(4))
    memory = read(torch.optim.SGD([shared]), torch.optim.SGD([own, shared]))
    assert memory.parts_of(torch.optim.SGD([own])) == {1}
    assert len(memory.parts_of(torch.optim.SGD([shared]))) == 1
    assert memory.parts_of(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])) == frozenset()


def test_an_optimizer_of_pieces_or_of_more_is_known_by_the_memory_that_it_reaches_into() -> None:
    whole = torch.ones(100)
    first, second = torch.nn.Parameter(whole[10:40]), torch.nn.Parameter(whole[40:70])
    long = torch.nn.Parameter(whole[5:95])

    def parts(*optimizers: torch.optim.Optimizer) -> list[frozenset[int]]:
        memory = read(*optimizers)
        ranges = [(0, 100), (10, 30), (12, 20), (35, 45), (40, 41), (69, 80), (70, 80), (0, 10), (0, 11), (96, 99)]
        pieces = [torch.nn.Parameter(whole[begin:end]) for begin, end in ranges]
        return [memory.parts_of(torch.optim.SGD([piece])) for piece in pieces]

    one, other, neither, both = frozenset([0]), frozenset([1]), frozenset[int](), frozenset([0, 1])
    apart = [torch.optim.SGD([first]), torch.optim.SGD([second])]
    assert parts(*apart) == [both, one, one, both, other, other, neither, neither, one, neither]
    found = parts(*apart, torch.optim.SGD([long]))
    assert [2 in owners for owners in found] == [True] * 9 + [False]
    assert [1 in owners for owners in found[4:6]] == [True, True]
    assert read(*apart, torch.optim.SGD([long])).parts_of(apart[0]) == {0, 2}


@pytest.mark.parametrize("view", [lambda memory: memory[::3], lambda memory: memory.view(-1, 10)[:, :2]])
def test_strided_memory_reaches_as_far_as_its_last_element(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    memory = torch.ones(100)
    optimizers = [torch.optim.SGD([torch.nn.Parameter(part)]) for part in (memory[:50], memory[50:])]
    strided = torch.optim.SGD([torch.nn.Parameter(view(memory))])
    assert read(*optimizers).parts_of(strided) == {0, 1}
    assert read(*optimizers, strided).parts_of(strided) >= {0, 1}


def test_an_optimizer_that_gets_other_parameters_is_looked_at_again() -> None:
    own, more = torch.nn.Parameter(torch.ones(6)), torch.nn.Parameter(torch.ones(4))
    optimizers = [torch.optim.SGD([own]), torch.optim.SGD([more])]
    memory = read(*optimizers)
    assert memory.parts_of(optimizers[0]) == {0}
    optimizers[0].add_param_group({"params": [more]})
    assert memory.parts_of(optimizers[0]) == {0, 1}


def test_an_optimizer_is_asked_where_its_parameters_are_now() -> None:
    one, other = torch.nn.Parameter(torch.ones(6)), torch.nn.Parameter(torch.ones(4))
    optimizers = [torch.optim.SGD([one]), torch.optim.SGD([other])]
    memory = read(*optimizers)
    one.data, other.data = other.data, one.data
    assert [memory.parts_of(item) for item in optimizers] == [{0, 1}, {0, 1}]  # Each its own, too.


def test_what_has_no_address_is_nobodys() -> None:
    freed, other = torch.nn.Parameter(torch.ones(6)), torch.nn.Parameter(torch.ones(3))
    for parameter in (freed, other):
        parameter.untyped_storage().resize_(0)
    memory = SteppedMemory([torch.optim.SGD([freed])])
    numbers, owners = found(memory, other).tolist(), memory.parts_of(torch.optim.SGD([other]))
    assert (numbers, owners) == ([-1], frozenset())  # Nobody may print what was freed.


def test_tensors_without_an_address_are_left_out() -> None:
    dense = torch.nn.Parameter(torch.ones(6))
    optimizer = torch.optim.SGD([dense])
    optimizer.param_groups[0]["params"].append(torch.eye(3).to_sparse())
    memory = SteppedMemory([optimizer])
    assert found(memory, dense)[0] >= 0


def test_without_optimizers_nothing_is_found() -> None:
    assert found(SteppedMemory(), torch.ones(3)).tolist() == [-1]


def test_short_tensors_are_left_out_and_alone_not_even_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = torch.nn.Parameter(torch.ones(6)), torch.nn.Parameter(torch.ones(60))
    optimizers = [torch.optim.SGD([short]), torch.optim.SGD([long])]
    asked: list[int] = []

    def counted(tensors: Sequence[torch.Tensor]) -> Places:
        asked.append(len(tensors))
        return places_of(tensors)

    monkeypatch.setattr(stepped_memory, "places_of", counted)
    memory = SteppedMemory(optimizers, bytes_min=100)
    assert found(memory, short).tolist() == [-1]
    assert (asked, memory.parts_of(optimizers[1])) == ([], frozenset())
    numbers = found(memory, short, long)
    assert (numbers >= 0).tolist() == [False, True]
    assert memory.owners[numbers[1]] == 1
    assert asked == [1, 1]
    assert (memory.parts_of(optimizers[0]), memory.parts_of(optimizers[1])) == ({0}, {1})
