"""Lists that tests go through item by item: each EVERY-th is taken, all of them by default.

`.ci/run` takes a share: at least one of each group, else by chance, so that no pattern of the list is left out. What
is drawn depends on the list's name, the core, and ASYNCCKPT_SHARE, a number that CI takes from the commit and prints.
`make test-faults` and `make test-interrupts` take all.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import pytest

EVERY = int(os.environ.get("ASYNCCKPT_EVERY", "1"))
T = TypeVar("T")


def share_of(
    items: Iterable[T], name: str, *, every: int = 1, by: Callable[[T], Hashable] = lambda item: None
) -> list[T]:
    """Return one of n items of each group, rounded up, in their order, where n is EVERY, or `every` if that is more."""
    listed, step = list(items), max(EVERY, every)
    if step == 1:
        return listed
    drawn = random.Random(f"{name} {os.environ.get('ASYNCCKPT_NATIVE')} {os.environ.get('ASYNCCKPT_SHARE')}")
    groups: dict[Hashable, list[int]] = {}
    for number, item in enumerate(listed):
        groups.setdefault(by(item), []).append(number)
    taken = [number for group in groups.values() for number in drawn.sample(group, -(-len(group) // step))]
    return [listed[number] for number in sorted(taken)]


def slow_but_for_a_share(items: Iterable[T], name: str, *, every: int) -> list[Any]:
    """Return all items as parameters of a test; but for one in `every`, it is slow (`make test-slow`)."""
    listed = list(items)
    taken = share_of(range(len(listed)), name, every=every)
    return [
        pytest.param(*(item if type(item) is tuple else (item,)), marks=() if number in taken else pytest.mark.slow)
        for number, item in enumerate(listed)
    ]


def is_drawn(name: str, every: int) -> bool:
    """Return whether this one of many names is drawn, as one in `every` is."""
    return random.Random(f"{name} {os.environ.get('ASYNCCKPT_SHARE')}").randrange(every) == 0
