"""What docs/ranks.md says a call costs: messages, and nothing that grows faster than the ranks."""

from __future__ import annotations

import pytest

from bench.ranks import measure

pytestmark = pytest.mark.any_core


@pytest.mark.parametrize("ranks_count", [2, 9])
def test_a_call_is_two_messages_of_each_rank_and_two_to_all(ranks_count: int) -> None:
    figures = measure(ranks_count)
    others = ranks_count - 1
    assert figures.sent_count == 2 * others + 2
    assert figures.received_count == 4 * others
    assert figures.sent_bytes < 700 * ranks_count
