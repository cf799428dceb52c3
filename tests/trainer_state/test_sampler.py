"""The order of samples, and that a position means the same for every number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

import asyncckpt
from asyncckpt.trainer_state import ResumableSampler

pytestmark = pytest.mark.any_core


def of_all_ranks(
    count: int, ranks_count: int, *, epoch: int = 0, consumed: int = 0, drop_last: bool = False
) -> list[int]:
    """What all ranks get, in the order in which they consume it together."""
    parts = []
    for rank in range(ranks_count):
        sampler = ResumableSampler(count, seed=4, rank=rank, ranks_count=ranks_count, drop_last=drop_last)
        sampler.set_position(epoch=epoch, samples_consumed=consumed)
        part = list(sampler)
        assert len(part) == len(sampler)
        parts.append(part)
    assert len({len(part) for part in parts}) == 1
    return [index for row in zip(*parts, strict=True) for index in row]


def test_an_epoch_is_a_permutation_of_its_own() -> None:
    orders = [of_all_ranks(50, 1, epoch=epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert orders[0] == of_all_ranks(50, 1)
    assert list(ResumableSampler(5, shuffle=False)) == [0, 1, 2, 3, 4]
    # Neither epoch e + 1 of seed s nor epoch e of seed s + 1 is like another.
    other = ResumableSampler(50, seed=5)
    assert list(other) not in orders


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 5), st.integers(0, 50))
def test_ranks_continue_at_the_same_position(count: int, before: int, after: int, steps: int) -> None:
    whole = of_all_ranks(count, 1)
    consumed = min(count, steps * before)
    taken = of_all_ranks(count, before)[:consumed]
    rest = of_all_ranks(count, after, consumed=consumed)
    assert (taken + rest)[:count] == whole  # Then the first ones again, to fill up.
    assert (taken + rest)[count:] == (whole * after)[: len(taken + rest) - count]
    assert len(of_all_ranks(count, after, consumed=consumed, drop_last=True)) == (count - consumed) // after * after


@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_share_as_torchs_distributed_sampler_does(drop_last: bool) -> None:
    for count, ranks_count in ((10, 4), (12, 3), (3, 4)):
        for rank in range(ranks_count):
            theirs = DistributedSampler(range(count), ranks_count, rank, shuffle=False, drop_last=drop_last)
            ours = ResumableSampler(count, shuffle=False, rank=rank, ranks_count=ranks_count, drop_last=drop_last)
            expected = list(theirs) if count >= ranks_count or not drop_last else []
            assert list(ours) == expected


def test_seeds_of_samples_belong_to_sample_and_epoch() -> None:
    def seeds(epoch: int, ranks_count: int = 1, rank: int = 0) -> dict[int, int]:
        sampler = ResumableSampler(30, rank=rank, ranks_count=ranks_count, sample_seeds=True)
        sampler.set_position(epoch=epoch, samples_consumed=0)
        return dict(sampler)

    first = seeds(0)
    assert len({*first.values(), *seeds(1).values()}) == 60
    assert seeds(0, ranks_count=2, rank=1).items() <= first.items()
    assert all(type(seed) is int and 0 <= seed < 2**63 for seed in first.values())


def test_nothing_is_drawn_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    list(ResumableSampler(100))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"samples": 0}, "samples must be"),
        ({"samples": True}, "samples must be"),
        ({"samples": []}, "samples must be"),
        ({"samples": 3, "seed": 2**63}, "seed must be"),
        ({"samples": 3, "seed": 1.5}, "seed must be"),
        ({"samples": 3, "rank": 2, "ranks_count": 2}, "rank and ranks_count must be"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(asyncckpt.UsageError, match=text):
        ResumableSampler(**arguments)  # type: ignore[arg-type]
