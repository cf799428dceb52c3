"""The log of removed ids: what it knows, and what it forgets."""

from __future__ import annotations

import numpy as np
import pytest

from asyncckpt.tables.touched_rows import EpochLog


def log_of(*epochs: tuple[int, list[int]], count_max: int = 1000) -> EpochLog:
    log = EpochLog()
    for epoch, ids in epochs:
        log.add(np.array(ids, dtype=np.int64), epoch=epoch, count_max=count_max)
    return log


def since(log: EpochLog, epoch: int) -> list[int] | None:
    found = log.since(epoch)
    assert found is None or found.dtype == np.int64
    return None if found is None else found.tolist()


def test_ids_removed_after_the_end_of_an_epoch_are_distinct_and_ascending() -> None:
    log = log_of((1, [5]), (2, [9, -3]), (2, [7]), (4, [9, 1]))
    assert [since(log, epoch) for epoch in range(6)] == [[-3, 1, 5, 7, 9], [-3, 1, 7, 9], [1, 9], [1, 9], [], []]


def test_oldest_epochs_are_dropped_whole() -> None:
    log = log_of((1, [1, 2]), (2, [3, 4]), (3, [5]), count_max=4)
    assert [since(log, epoch) for epoch in range(4)] == [None, [3, 4, 5], [5], []]
    assert len(log) == 3


def test_an_epoch_larger_than_the_bound_is_dropped_too() -> None:
    log = log_of((1, [1]), (2, [2, 3, 4]), count_max=2)
    assert len(log) == 0
    assert [since(log, epoch) for epoch in range(3)] == [None, None, []]
    log.add(np.array([8], dtype=np.int64), epoch=2, count_max=2)
    assert [since(log, 1), since(log, 2)] == [None, []], "the rest of an epoch is no answer for all of it"
    log.add(np.array([9], dtype=np.int64), epoch=3, count_max=2)
    assert since(log, 2) == [9]


def test_a_log_that_is_exactly_full_is_kept() -> None:
    assert since(log_of((1, [1, 2]), (2, [3]), count_max=3), 0) == [1, 2, 3]


def test_forgotten() -> None:
    log = log_of((1, [1]), (2, [2]))
    log.forget_all(epoch=2)
    assert [since(log, 1), since(log, 2), len(log)] == [None, [], 0]


@pytest.mark.parametrize("seed", range(3))
def test_against_a_list(seed: int) -> None:
    """Through many doublings and drops; whatever the log still knows is right, and it knows what fits."""
    random = np.random.default_rng(seed)
    log, all_of, count_max = EpochLog(), [], 3000
    for epoch in range(1, 120):
        for _ in range(int(random.integers(0, 4))):
            ids = random.integers(-500, 500, size=int(random.integers(0, 200)))
            log.add(ids, epoch=epoch, count_max=count_max)
            all_of += [(epoch, id) for id in ids.tolist()]
        assert len(log) <= count_max
        for asked in {epoch, epoch - 1, int(random.integers(0, epoch)), int(random.integers(0, epoch))}:
            later = [id for at, id in all_of if at > asked]
            assert since(log, asked) in (None, sorted(set(later)))
            if len(later) <= count_max and asked:
                assert since(log, asked) is not None


def test_more_numbers_than_it_may_hold_are_not_kept() -> None:
    log = EpochLog()
    log.add(np.arange(3), epoch=1, count_max=10)
    log.add(np.arange(1000), epoch=2, count_max=10)
    assert len(log) == 0
    assert log.since(0) is None
    assert log.since(1) is None
    log.add(np.array([5, 4]), epoch=3, count_max=10)
    found = log.since(2)
    assert found is not None
    assert found.tolist() == [4, 5]
