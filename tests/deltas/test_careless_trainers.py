"""Random programs of a trainer that knows nothing of marks: every checkpoint is what a plain dict was at the call."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncckpt.errors import CorruptError
from asyncckpt.tables.row_store import Level

from .careless_trainer import wrong_steps

PROGRAMS_COUNT = 40
PROGRAMS_SLOW_COUNT = 2000
CONTROL_COUNT = 20
LANES = 4


@pytest.mark.random
@pytest.mark.parametrize("lane", range(LANES))
def test_every_checkpoint_is_what_was_trained(lane: int, tmp_path: Path, base_seed: int, runs_factor: int) -> None:
    for number in range(lane, runs_factor * PROGRAMS_COUNT, LANES):
        seed = base_seed + number
        assert wrong_steps(tmp_path / str(seed), seed) == [], f"program {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("lane", range(LANES))
def test_many_programs(lane: int, tmp_path: Path) -> None:
    for seed in range(100_000 + lane, 100_000 + PROGRAMS_SLOW_COUNT, LANES):
        assert wrong_steps(tmp_path / str(seed), seed) == [], f"program {seed}"


def test_the_programs_find_a_table_that_does_not_look_at_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an old row, in a step or in the table after a load of one; or by an id that stands twice, an old one."""
    monkeypatch.setattr(Level, "written_by_others", lambda level: [])
    for seed in range(CONTROL_COUNT):
        try:
            wrong = wrong_steps(tmp_path / str(seed), seed)
        except (AssertionError, CorruptError):
            return
        if wrong:
            return
    pytest.fail(f"{CONTROL_COUNT} programs have found nothing")
