"""The promises of the protocol hold in every seed. A failure prints the command that runs its seed again."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.simulator.disk import Violation
from tests.simulator.job import run_seed
from tests.simulator.mutants import MUTANTS, CountsPreparedOfAnyAttempt, DecidesAgain, installed
from tests.simulator.schedule import PROFILES

pytestmark = pytest.mark.any_core

SEEDS_PER_TEST = 300
MUTANT_SEEDS_MAX = 4000
# These err only when a message of another call comes, so there is no need to look elsewhere.
ONLY_STRANGERS_SHOW = {CountsPreparedOfAnyAttempt, DecidesAgain}


def run_seeds(seeds: range) -> Counter[str]:
    endings: Counter[str] = Counter()
    for seed in seeds:
        endings.update(run_seed(seed).endings)
    return endings


@pytest.mark.parametrize("first", range(0, 1500, SEEDS_PER_TEST))
def test_promises_hold(first: int) -> None:
    endings = run_seeds(range(first, first + SEEDS_PER_TEST))
    # Each way that a call can end has been seen, or the seeds would show little.
    assert endings.keys() == {"committed", "found", "aborted", "skipped", "in_doubt"}
    assert endings["committed"] > SEEDS_PER_TEST


@pytest.mark.parametrize("seed", range(16))
def test_promises_hold_of_64_ranks(seed: int) -> None:
    run_seed(seed, ranks_count=64)


@pytest.mark.parametrize("seed", random.Random(5).sample(range(10_000), 8))
def test_a_seed_always_does_the_same(seed: int) -> None:
    one, other = run_seed(seed, is_traced=True), run_seed(seed, is_traced=True)
    assert one == other
    assert len(one.trace) > 10


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_machine_is_found(mutant: type) -> None:
    seeds = range(MUTANT_SEEDS_MAX)
    if mutant in ONLY_STRANGERS_SHOW:
        seeds = seeds[PROFILES.index("network") :: len(PROFILES)]
    with installed(mutant), pytest.raises(Violation, match=r"python -m tests\.simulator --seed \d+"):
        run_seeds(seeds)
