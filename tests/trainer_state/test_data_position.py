"""A resumed loader continues with exactly the next batch."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

import asyncckpt
from asyncckpt.trainer_state import DataPosition, ResumableSampler, SeededSamples

pytestmark = pytest.mark.any_core
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="workers of data are forked here")


class Augmented(Dataset[Any]):
    """Twenty-three samples, each with numbers drawn while it was made."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.random()), torch.rand(1).item()


def position(*, workers: int = 0, batch_size: int = 3, seeded: bool = False, **options: Any) -> DataPosition:
    sampler = ResumableSampler(23, seed=1, sample_seeds=seeded, **options)
    data = SeededSamples(Augmented()) if seeded else Augmented()
    return DataPosition(DataLoader(data, batch_size=batch_size, sampler=sampler, num_workers=workers))


def shown(batch: Any) -> list[list[float]]:
    return [part.tolist() for part in batch]


def indices(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=needs_fork)])
@pytest.mark.parametrize("taken", [0, 1, 5, 8])
def test_the_next_batch_is_the_next_one(workers: int, taken: int) -> None:
    # With workers the sampler is four batches ahead of the loop.
    data = position(workers=workers, seeded=True)
    whole = [shown(batch) for batch in data] + [shown(batch) for batch in data]
    data = position(workers=workers, seeded=True)
    running = iter(data)
    for _ in range(taken):
        next(running)
    state = data.state_dict()
    next(running, None)  # Was not saved.
    resumed = position(workers=workers, seeded=True)
    resumed.load_state_dict(state)
    assert [shown(batch) for batch in resumed] + [shown(batch) for batch in resumed] == whole[taken:]


@needs_fork
def test_seeded_samples_are_the_same_for_any_workers() -> None:
    batches = [[shown(batch) for batch in position(workers=workers, seeded=True)] for workers in (0, 2)]
    assert batches[0] == batches[1]
    drawn = [number for batch in batches[0] for number in batch[1]]
    assert len(set(drawn)) == len(drawn)


def test_seeded_samples_draw_nothing_in_the_main_process() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    list(position(seeded=True))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_making_iterators_draws_nothing() -> None:
    # An interrupted run makes one more.
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(range(8), batch_size=2, sampler=ResumableSampler(8), generator=generator)
    states = torch.get_rng_state(), generator.get_state()
    data = DataPosition(loader)
    next(iter(data))
    next(iter(data))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(generator.get_state(), states[1])


def test_workers_get_the_same_base_seed_after_a_resume() -> None:
    def base_seed(data: DataPosition) -> int:
        return data._new_iterator()._base_seed  # type: ignore[attr-defined]

    data = position()
    first = base_seed(data)
    next(iter(data))
    torch.rand(1)
    resumed = position()
    resumed.load_state_dict(data.state_dict())
    assert base_seed(resumed) == first
    list(resumed)
    assert base_seed(resumed) != first


def test_a_loop_that_was_left_goes_on() -> None:
    data = position()
    whole = indices(position())
    for count, batch in enumerate(data):
        assert batch[0].tolist() == whole[count]
        if count == 2:
            break
    assert (data.epoch, data.samples_consumed) == (0, 9)
    assert indices(data) == whole[3:]
    assert (data.epoch, data.samples_consumed) == (1, 0)


def test_a_save_behind_the_last_batch_goes_on_with_the_next_epoch() -> None:
    data = position()
    states = [data.state_dict() for _ in data]
    assert states[-1]["samples_consumed"] == 23
    resumed = position()
    resumed.load_state_dict(states[-1])
    assert indices(resumed) == []
    assert indices(resumed) == indices(data)


@pytest.mark.parametrize("ranks_after", [1, 2, 4, 3])
def test_other_ranks_continue_at_the_same_sample(ranks_after: int) -> None:
    whole = [index for batch in indices(position(rank=0, ranks_count=1)) for index in batch]
    ranks = [position(rank=rank, ranks_count=2) for rank in range(2)]
    iterators = [iter(data) for data in ranks]
    taken = [batch[0].tolist() for _ in range(2) for batch in map(next, iterators)]
    assert ranks[0].state_dict() == ranks[1].state_dict()
    assert ranks[0].samples_consumed == 12
    assert sorted(index for batch in taken for index in batch) == sorted(whole[:12])
    resumed = [position(rank=rank, ranks_count=ranks_after, batch_size=2) for rank in range(ranks_after)]
    for data in resumed:
        data.load_state_dict(ranks[0].state_dict())
    rest = [[index for batch in indices(data) for index in batch] for data in resumed]
    together = [index for row in zip(*rest, strict=True) for index in row]
    assert together[:11] == whole[12:]


def test_a_batch_sampler_and_single_samples() -> None:
    batches = BatchSampler(ResumableSampler(23), batch_size=4, drop_last=True)
    data = DataPosition(DataLoader(range(23), batch_sampler=batches))
    next(iter(data))
    assert data.samples_consumed == 4
    assert len(list(data)) == 4
    single = DataPosition(DataLoader(range(23), batch_size=None, sampler=ResumableSampler(23)))
    next(iter(single))
    assert single.samples_consumed == 1


def test_the_seed_of_the_checkpoint_is_taken() -> None:
    data = position()
    whole = indices(data)
    other = DataPosition(DataLoader(Augmented(), batch_size=3, sampler=ResumableSampler(23, seed=77)))
    other.load_state_dict(position().state_dict())
    assert indices(other) == whole


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"samples_count": 24}, "another order of samples: samples_count, found 24, expected 23"),
        ({"shuffle": False}, "another order of samples: shuffle"),
        ({"samples_consumed": 1.5}, "something else than numbers"),
        ({"epoch": None}, "something else than numbers"),
        ({"loader": {}}, "another kind of loader"),
    ],
)
def test_a_position_that_does_not_fit(change: dict[str, Any], text: str) -> None:
    data = position()
    with pytest.raises(asyncckpt.IncompatibleError, match=text):
        data.load_state_dict({**data.state_dict(), **change})
    assert (data.epoch, data.samples_consumed) == (0, 0)


def test_a_load_ends_an_iteration() -> None:
    data = position()
    running = iter(data)
    next(running)
    data.load_state_dict(position().state_dict())
    with pytest.raises(asyncckpt.UsageError, match="loaded during an iteration"):
        next(running)


def test_loaders_whose_position_is_unknown_are_refused() -> None:
    for loader in (DataLoader(range(3)), [1, 2, 3], DataLoader(range(3), batch_sampler=[[0], [1]])):
        with pytest.raises(asyncckpt.UsageError, match="position of this loader cannot be saved"):
            DataPosition(loader)


class KeepsItself:
    """A loader in the shape of torchdata's StatefulDataLoader: its iterator draws when it is made."""

    def __init__(self) -> None:
        self._next = 0
        self._order: torch.Tensor | None = None

    def __iter__(self) -> Iterator[int]:
        torch.rand(1)
        if self._order is None:
            self._order = torch.randperm(10)
        return self._rest(self._order)

    def _rest(self, order: torch.Tensor) -> Iterator[int]:
        while self._next < 10:
            self._next += 1
            yield int(order[self._next - 1])
        self._next, self._order = 0, None

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "order": self._order, "seen": (np.arange(2), {"x": np.float32(2)})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert isinstance(state["seen"], tuple)
        assert state["seen"][0].tolist() == [0, 1]
        self._next, self._order = state["next"], state["order"]


def test_a_loader_that_keeps_its_position() -> None:
    torch.manual_seed(0)
    data = DataPosition(KeepsItself())
    drawn = []
    running = iter(data)
    for _ in range(4):
        drawn.append((next(running), torch.rand(1).item()))
    state, generator = data.state_dict(), torch.get_rng_state()
    assert not any(isinstance(value, torch.Tensor) for value in state["loader"]["dict"].values())
    expected = [(item, torch.rand(1).item()) for item in running]
    resumed = DataPosition(KeepsItself())
    resumed.load_state_dict(state)
    torch.set_rng_state(generator)
    assert [(item, torch.rand(1).item()) for item in resumed] == expected
    assert resumed.epoch == 1
    with pytest.raises(asyncckpt.IncompatibleError, match="another kind of loader"):
        resumed.load_state_dict(position().state_dict())
