"""What happens in one simulated job, drawn from its seed: who calls what, and what goes wrong when."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncckpt.coordination.messages import Limits

# Short, so that a seed holds few messages of the kind "I am alive". All seconds are virtual.
LIMITS = Limits(begin_s=20.0, silence_s=4.0, save_s=40.0)
PROFILES = ("calm", "deaths", "network", "zombies", "disk", "callers", "chaos", "chaos")
DISK_SECONDS_MAX = 90.0
STEPS_PER_CALL = 12  # About as many things a participant does in a call; where deaths and pauses are put.


@dataclass(frozen=True)
class Partition:
    """From `begin` to `end` the ranks of one side do not reach the others: messages are lost, or held till the end."""

    begin: float
    end: float
    side: frozenset[int]
    loses: bool


@dataclass(frozen=True)
class Behaviour:
    """What one rank does in one call. step_offset and fact: what it saves that the others do not."""

    what: str = "save"  # save, skip, fail, never
    late_s: float = 0.0
    kind: str = "full"
    step_offset: int = 0
    fact: str = "alike"


@dataclass(frozen=True)
class JobSchedule:
    """One job. Probabilities are per event; deaths and pauses are by the count of things that a rank has done."""

    seed: int
    profile: str
    ranks_count: int
    calls_count: int
    repeats_step: bool = False
    delay_s: tuple[float, float] = (0.001, 0.05)
    long_delay: float = 0.0
    duplicate: float = 0.0
    stray: float = 0.0
    keeps_order: bool = True
    encodes: bool = False
    partitions: tuple[Partition, ...] = ()
    deaths: Mapping[int, int] = field(default_factory=dict)
    pauses: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    cuts: Mapping[int, float] = field(default_factory=dict)
    server_dies_with_rank_0: bool = False
    rename_can_vanish: bool = False
    write_s: tuple[float, float] = (0.1, 2.0)
    slow_disk: float = 0.0
    write_failure: float = 0.0
    folder_failure: float = 0.0
    publish_modes: tuple[str, ...] = ("ok",)
    look_failure: float = 0.0
    behaviours: Mapping[tuple[int, int], Behaviour] = field(default_factory=dict)

    def behaviour(self, rank: int, call: int) -> Behaviour:
        return self.behaviours.get((rank, call), Behaviour())


def draw(seed: int, *, ranks_count: int | None = None) -> JobSchedule:
    """The schedule of a seed; the profile goes round with the seed, everything else is random."""
    rng = random.Random(seed)
    profile = PROFILES[seed % len(PROFILES)]
    ranks = ranks_count or _ranks_count(rng)
    calls = 1 if ranks > 16 else rng.randint(1, 4)
    facts: dict[str, object] = {"repeats_step": rng.random() < 0.2, "encodes": rng.random() < 0.1}
    facts["behaviours"] = _kinds(rng, ranks, calls)
    parts = {
        "deaths": _deaths,
        "network": _network,
        "zombies": _zombies,
        "disk": _disk,
        "callers": _callers,
    }
    for name, part in parts.items():
        if profile == name or (profile == "chaos" and rng.random() < 0.5):
            for key, value in part(rng, ranks, calls).items():
                facts[key] = {**facts["behaviours"], **value} if key == "behaviours" else value  # type: ignore[dict-item]
    return JobSchedule(seed=seed, profile=profile, ranks_count=ranks, calls_count=calls, **facts)  # type: ignore[arg-type]


def _ranks_count(rng: random.Random) -> int:
    chance = rng.random()
    if chance < 0.02:
        return 64
    return rng.randint(6, 16) if chance < 0.2 else rng.randint(2, 5)


def _kinds(rng: random.Random, ranks: int, calls: int) -> dict[tuple[int, int], Behaviour]:
    return {
        (rank, call): Behaviour(late_s=rng.random() * 0.5, kind=rng.choice(("full", "delta")))
        for call in range(1, calls + 1)
        for rank in range(ranks)
        if rng.random() < 0.3
    }


def _some_ranks(rng: random.Random, ranks: int) -> list[int]:
    """One or two, rank 0 often: it decides."""
    chosen = {0 if rng.random() < 0.4 else rng.randrange(ranks) for _ in range(rng.randint(1, 2))}
    return sorted(chosen)


def _doings(rng: random.Random, rank: int, ranks: int, calls: int) -> int:
    """When a rank dies or stops: rank 0 says everything once to each of the others."""
    return rng.randint(1, calls * (STEPS_PER_CALL + (4 * ranks if rank == 0 else 0)))


def _deaths(rng: random.Random, ranks: int, calls: int) -> dict[str, object]:
    return {
        "deaths": {rank: _doings(rng, rank, ranks, calls) for rank in _some_ranks(rng, ranks)},
        "server_dies_with_rank_0": rng.random() < 0.5,
        "rename_can_vanish": rng.random() < 0.5,
    }


def _network(rng: random.Random, ranks: int, calls: int) -> dict[str, object]:
    partitions = []
    for _ in range(rng.randint(0, 2)):
        begin = rng.random() * 8 * calls
        seconds = rng.choice((0.5, 3.0, 10.0, 50.0)) * rng.random()
        side = frozenset(rank for rank in range(ranks) if rng.random() < 0.4)
        partitions.append(Partition(begin, begin + seconds, side, loses=rng.random() < 0.5))
    return {
        "delay_s": (0.001, rng.choice((0.05, 0.5, 3.0))),
        "long_delay": rng.choice((0.0, 0.02, 0.2)),
        "duplicate": rng.choice((0.0, 0.1, 0.5)),
        "stray": rng.choice((0.0, 0.3, 0.9)),
        "keeps_order": rng.random() < 0.8,
        "partitions": tuple(partitions),
        "cuts": {rank: rng.random() * 8 * calls for rank in _some_ranks(rng, ranks) if rng.random() < 0.3},
    }


def _zombies(rng: random.Random, ranks: int, calls: int) -> dict[str, object]:
    return {
        "pauses": {
            rank: (_doings(rng, rank, ranks, calls), rng.choice((2.0, 8.0, 30.0, 120.0)) * rng.random())
            for rank in _some_ranks(rng, ranks)
        }
    }


def _disk(rng: random.Random, ranks: int, calls: int) -> dict[str, object]:
    return {
        "slow_disk": rng.choice((0.0, 0.02, 0.2)),
        "write_failure": rng.choice((0.0, 0.0, 0.5 / ranks)),
        "folder_failure": rng.choice((0.0, 0.0, 0.3)),
        "publish_modes": rng.choice((("ok",), ("ok", "fails"), ("ok", "in_doubt", "in_doubt_absent"))),
        "look_failure": rng.choice((0.0, 0.3)),
    }


def _callers(rng: random.Random, ranks: int, calls: int) -> dict[str, object]:
    odd = (
        Behaviour("skip"),
        Behaviour("fail"),
        Behaviour("never"),
        Behaviour(step_offset=1),
        Behaviour(fact="other"),
        Behaviour(late_s=15.0),
        Behaviour(late_s=30.0),
    )
    return {"behaviours": {(rank, rng.randint(1, calls)): rng.choice(odd) for rank in _some_ranks(rng, ranks)}}
