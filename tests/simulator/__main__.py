"""Run seeds of the simulator by hand: see the package's docstring."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.simulator.disk import Violation
from tests.simulator.job import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--ranks", type=int, help="as many ranks in every seed, instead of 2 to 64")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds) if options.seed is None else [options.seed]
    begun, messages = time.perf_counter(), 0
    endings: dict[str, Counter[str]] = {}
    for seed in seeds:
        try:
            report = run_seed(seed, is_traced=options.trace, ranks_count=options.ranks)
        except Violation as violation:
            print(violation)
            return 1
        print(*report.trace, sep="\n", end="\n" if report.trace else "")
        messages += report.messages_count
        endings.setdefault(report.schedule.profile, Counter()).update(report.endings)
    print(f"{len(seeds)} seeds, {messages} messages, {time.perf_counter() - begun:.1f} s: every promise was kept")
    for profile, counts in sorted(endings.items()):
        print(f"  {profile:8}", ", ".join(f"{count} {ending}" for ending, count in counts.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
