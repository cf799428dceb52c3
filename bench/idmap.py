"""How fast ids become rows: the id map of HashTable beside a Python dict and a sorted NumPy array.

    python bench/idmap.py                 10 million ids, as on a training host
    python bench/idmap.py --ids 200000    a quick look
    python bench/idmap.py --json out.json also write the figures

Expected, before measuring: a table of 10 M ids is far larger than the caches, so a lookup costs about one cache miss,
80-100 ns, less what prefetching hides; a dict pays for the int object as well; a binary search pays log2(10 M) = 23
steps, the last ten or so of them misses.

Measured on 2 cores of an AMD EPYC, other work running beside it, 7 rounds, in millions of ids a second:

                              insert    lookup
    id map (native)            14.17     48.08
    HashTable.lookup            9.21     41.61
    dict                        1.65      1.08
    sorted array               14.62      0.85

Prefetching hides most of the miss, 21 ns a lookup. HashTable adds about 15 us a batch to the native call.

Rounds are interleaved, in a new order each, so that a noisy neighbour disturbs all alike; a figure is the median.
An insert round starts from an empty map and grows it. The sorted array cannot take ids one batch at a time: its insert
figure is one sort of all ids. Batches have 16384 ids, drawn at random from those present.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.native import core
from asyncckpt.tables import HashTable

BATCH_IDS = 16_384
LOOKUP_BATCHES = 100

I64 = NDArray[np.int64]
Lookup = Callable[[I64], object]


@dataclass(frozen=True)
class Figure:
    """Medians over the rounds, in millions of ids per second."""

    name: str
    insert_mids_per_s: float
    lookup_mids_per_s: float


def batches(ids: I64) -> list[I64]:
    return [ids[begin : begin + BATCH_IDS] for begin in range(0, ids.size, BATCH_IDS)]


def fill_native_map(ids: I64) -> Lookup:
    """The bare id map, without columns."""
    id_map = core.id_map(BATCH_IDS)
    for part in batches(ids):
        id_map.insert(part)
    return id_map.find


def fill_table(ids: I64) -> Lookup:
    """HashTable as training uses it: lookup that may insert, growth and first values of the rows included."""
    table = HashTable("bench", 1, capacity=BATCH_IDS)
    for part in batches(ids):
        table.lookup(torch.from_numpy(part))
    return lambda part: table.lookup(torch.from_numpy(part))


def fill_dict(ids: I64) -> Lookup:
    rows: dict[int, int] = {}
    for part in batches(ids):
        for id in part.tolist():
            rows.setdefault(id, len(rows))
    return lambda part: np.fromiter(map(rows.__getitem__, part.tolist()), dtype=np.int64, count=part.size)


def fill_sorted(ids: I64) -> Lookup:
    order = np.argsort(ids)
    ordered = ids[order]
    return lambda part: order[np.searchsorted(ordered, part)]


CONTESTANTS: dict[str, Callable[[I64], Lookup]] = {
    f"id map ({core.implementation})": fill_native_map,
    "HashTable.lookup": fill_table,
    "dict": fill_dict,
    "sorted array": fill_sorted,
}


def measure(ids: I64, probes: list[I64], fill: Callable[[I64], Lookup]) -> tuple[float, float]:
    """Return the rates of one round, in millions of ids per second."""
    begin = time.perf_counter()
    lookup = fill(ids)
    filled = time.perf_counter()
    for part in probes:
        lookup(part)
    end = time.perf_counter()
    return ids.size / (filled - begin) / 1e6, len(probes) * BATCH_IDS / (end - filled) / 1e6


def run(*, ids_count: int, rounds: int, seed: int) -> list[Figure]:
    random = np.random.default_rng(seed)
    # Any bit pattern, as hashed features are; repeats among so many patterns are too rare to matter.
    ids = random.integers(-(2**63), 2**63 - 1, size=ids_count, dtype=np.int64)
    probes = [random.choice(ids, size=BATCH_IDS) for _ in range(LOOKUP_BATCHES)]
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTESTANTS}
    for _ in range(rounds):
        # In a new order each: the memory that one contestant leaves behind changes what fresh pages cost the next.
        for name in random.permutation(list(CONTESTANTS)).tolist():
            rates[name].append(measure(ids, probes, CONTESTANTS[name]))
    return [
        Figure(
            name=name,
            insert_mids_per_s=statistics.median(insert for insert, _ in rounds_of),
            lookup_mids_per_s=statistics.median(lookup for _, lookup in rounds_of),
        )
        for name, rounds_of in rates.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ids", type=int, default=10_000_000, help="how many ids (default 10 million)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    figures = run(ids_count=arguments.ids, rounds=arguments.rounds, seed=arguments.seed)
    print(
        f"{arguments.ids} ids, median of {arguments.rounds} rounds, seed {arguments.seed}; millions of ids per second"
    )
    print(f"{'':24}{'insert':>10}{'lookup':>10}")
    for figure in figures:
        print(f"{figure.name:24}{figure.insert_mids_per_s:>10.2f}{figure.lookup_mids_per_s:>10.2f}")
    if arguments.json is not None:
        report = {"ids": arguments.ids, "rounds": arguments.rounds, "figures": [asdict(figure) for figure in figures]}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
