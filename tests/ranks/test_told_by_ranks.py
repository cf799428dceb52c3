"""When a rank dies, hangs, raises or disagrees, in an opening, a save or a restore, each other one is told which rank,
what was waited for and how long, what there was, and what to do.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import told_ranks as of
from tests.ranks.forked import RUN_S_MAX, await_end, end, start
from tests.shares import slow_but_for_a_share

pytestmark = [pytest.mark.any_core, pytest.mark.timeout(200)]

STRIKES = {"dies": signal.SIGKILL, "hangs": signal.SIGSTOP}
RANK_FAULTS: dict[str, Callable[[int, Path], None]] = {
    **{
        f"rank 1 {how} at {point} over {over}": partial(of.is_struck, point, strike, over)
        for how, strike in STRIKES.items()
        for point, over in (("begun", "store"), ("write", "store"), ("write", "file"))
    },
    **{
        f"rank 0 {how} at {point} over {over}": partial(of.coordinator_is_struck, point, strike, over)
        for how, strike in STRIKES.items()
        for point, over in (("folder", "store"), ("before commit", "store"), ("write", "file"))
    },
    **{f"rank 1 does not come over {over}": partial(of.does_not_come, over) for over in ("store", "file")},
    **{f"rank 0 does not come over {over}": partial(of.coordinator_does_not_come, over) for over in ("store", "file")},
    **{f"rank 1 {how} in a restore": partial(of.is_gone_in_a_restore, strike) for how, strike in STRIKES.items()},
    **{
        f"rank 0 {how} in a restore": partial(of.coordinator_is_gone_in_a_restore, strike)
        for how, strike in STRIKES.items()
    },
    **{
        job.__name__.replace("_", " "): job
        for job in (
            of.does_not_save,
            of.raises_in_a_filter,
            of.has_another_step,
            of.has_another_shape,
            of.has_metadata_that_cannot_be_saved,
            of.counts_other_ranks,
            of.opens_another_directory,
            of.cannot_open,
            of.cannot_restore,
            of.is_missing_in_turn,
        )
    },
}


@pytest.mark.parametrize("name", slow_but_for_a_share(RANK_FAULTS, "what ranks tell", every=10))
def test_each_rank_is_told_what_another_one_did(tmp_path: Path, name: str) -> None:
    outputs = [tmp_path / f"output-{rank}" for rank in range(of.RANKS)]
    ranks = [start(RANK_FAULTS[name], (rank, tmp_path), outputs[rank]) for rank in range(of.RANKS)]
    struck = 0 if name.startswith("rank 0") else of.VICTIM
    others: list[Any] = [process for rank, process in enumerate(ranks) if rank != struck or "hangs" not in name]
    try:
        codes = await_end(others, RUN_S_MAX)
    finally:
        for process in ranks:
            end(process)
    said = "\n".join(f"{output.name}: {output.read_text()[-3000:]}" for output in outputs if output.exists())
    assert {*codes} <= {0, -signal.SIGKILL}, said
    assert codes.count(0) >= of.RANKS - 1, said
