"""Random jobs, with deaths: no acknowledged row is lost, and what is said wrongly is refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.ranks.random_jobs import run_job

pytestmark = [pytest.mark.any_core]

AT_ONCE = 8
FEW = (9, 10, 11, 12)  # Where a rank that dies is missed at once.


def run_jobs(seeds: Iterable[int], folder: Path, *, plant: str | None = None) -> tuple[Counter[str], list[str]]:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        jobs = list(threads.map(lambda seed: run_job(seed, folder / str(seed), plant=plant), seeds))
    return sum((seen for seen, _ in jobs), Counter()), ["\n".join(wrong) for _, wrong in jobs if wrong]


@pytest.mark.timeout(300)
def test_some_random_jobs(tmp_path: Path) -> None:
    seen, problems = run_jobs(FEW, tmp_path)
    assert not problems, "\n\n".join(problems)
    assert seen["committed"]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("first", range(0, 500, 100))
def test_random_jobs(tmp_path: Path, first: int) -> None:
    seen, problems = run_jobs(range(first, first + 100), tmp_path)
    print(seen)
    assert not problems, "\n\n".join(problems)
    assert seen["committed"] > 100
    assert min(seen[what] for what in ("deltas", "deaths", "not committed", "refused")) > 10


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("plant", "found"),
    [
        ("a row is lost", r"step \d+: \d+ rows, expected"),
        ("told of what has failed", "was acknowledged and is lost"),
    ],
)
def test_a_planted_loss_is_found(tmp_path: Path, plant: str, found: str) -> None:
    """A row that a rank no longer has when it saves; a rank that takes a failed save for a success."""
    _, problems = run_jobs(range(12), tmp_path, plant=plant)
    assert any(re.search(found, problem) for problem in problems), problems
