"""Who writes what when some ranks have captured everything, and others the shares of an earlier decision."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.engine.ranks.replicas import Replica
from asyncckpt.engine.ranks.writers import DECISIONS_KEPT_MAX, Decision, Decisions, Held
from asyncckpt.errors import ConflictError

pytestmark = pytest.mark.any_core

NUMBERS = st.lists(st.integers(0, 12), unique=True, max_size=8)


def held(numbers: Sequence[int], *, size: int = 10) -> Held:
    return Held([Replica(f'["w{number}"]', size * number, f"form {size}") for number in numbers], {})


def decided(lists: Sequence[Held]) -> tuple[Decisions, Decision]:
    """By all ranks together, as "first"."""
    decisions = Decisions()
    decision = decisions.decide(lists, {}, is_same=False)
    decisions.add("first", decision)
    return decisions, decision


@given(st.lists(NUMBERS, min_size=2, max_size=4), st.data())
def test_what_is_captured_is_written_once_or_the_save_is_lost(before: list[list[int]], data: st.DataObject) -> None:
    """Some ranks hold others than before and have captured these, the others their shares of what was decided then."""
    decisions, first = decided([held(numbers) for numbers in before])
    changed = data.draw(st.sets(st.integers(0, len(before) - 1), min_size=1))
    now = [held(data.draw(NUMBERS)) if rank in changed else first.held[rank] for rank in range(len(before))]
    captured = [
        {item.path for item in (now[rank].items if rank in changed else first.share_of(rank))}
        for rank in range(len(before))
    ]
    captured_by = {rank: "first" for rank in range(len(before)) if rank not in changed}
    wanted = {item.path for one in now for item in one.items}
    if wanted <= set().union(*captured):
        owners = decisions.decide(now, captured_by, is_same=False).owners
        assert owners.keys() == wanted
        assert all(path in captured[rank] for path, rank in owners.items())
    else:
        with pytest.raises(ConflictError, match="on some ranks only"):
            decisions.decide(now, captured_by, is_same=False)


def test_what_a_rank_left_out_has_the_same_form_on_the_others() -> None:
    decisions, first = decided([held([1, 2]), held([1, 2])])
    left_out = next(item for item in first.held[0].items if first.owners[item.path] == 1)
    other = Held([Replica(left_out.path, left_out.bytes, "another form")], {})
    with pytest.raises(ConflictError, match=r"^tensor 'w\d+' is not the same on ranks 0 and 1"):
        decisions.decide([first.held[0], other], {0: "first"}, is_same=False)


def test_shares_of_a_decision_that_is_forgotten_are_lost() -> None:
    decisions, first = decided([held([1]), held([2])])
    for number in range(DECISIONS_KEPT_MAX):
        decisions.add(f"later {number}", first)
    with pytest.raises(ConflictError, match="rank 1 has captured what an older agreement asks for"):
        decisions.holder(1, "first")
