"""Which rank this process is: as given, as a group says, or as the default group says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from asyncckpt.errors import UsageError
from asyncckpt.model.own_rank import own_rank, rank_in_group


@pytest.fixture
def group() -> Iterator[Any]:
    """The middle one of three ranks."""
    store = dist.HashStore()
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - it makes the backend.

    dist.init_process_group("fake", store=store, rank=1, world_size=3)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_a_process_alone_is_rank_0_of_1() -> None:
    assert rank_in_group() is None
    assert own_rank(None, None) == (0, 1)
    assert own_rank(2, 5) == (2, 5)
    with pytest.raises(UsageError, match=r"torch\.distributed is not initialised"):
        own_rank(0, 2, object())


def test_the_default_group_counts_where_nothing_is_given(group: Any) -> None:
    assert rank_in_group() == own_rank(None, None) == own_rank(None, None, group) == (1, 3)
    assert own_rank(0, 2) == (0, 2)
    assert own_rank(1, 3, group) == (1, 3)


def test_a_group_that_is_given_must_agree(group: Any) -> None:
    with pytest.raises(UsageError, match="index and num are not those of the process group") as caught:
        own_rank(0, 2, group, names=("index", "num"))
    assert (caught.value.found, caught.value.expected) == ((0, 2), (1, 3))


def test_a_process_that_is_not_in_the_group_is_refused(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group=None: -1)
    with pytest.raises(UsageError, match="this process is not in the process group"):
        rank_in_group(group)


@pytest.mark.parametrize("given", [(0, None), (None, 1), (2, 2), (-1, 2), (True, 2), (0, 0), ("0", 1), (0, 2.0)])
def test_numbers_that_cannot_be_are_refused(given: tuple[Any, Any]) -> None:
    with pytest.raises(UsageError, match=r"^index and num (must be|are given together)"):
        own_rank(*given, names=("index", "num"))
