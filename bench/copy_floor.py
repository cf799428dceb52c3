"""Copies of many segments into touched memory, in a process of their own: what the call of a save is held against.

python -m bench.copy_floor '{"figures_path": ...}'
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.peers.raw_floor import RawFloor
from bench.state import tensors_state

REPEATS_COUNT = 7


@dataclass(frozen=True)
class CopyFloorSpec:
    figures_path: str
    tensors_count: int
    tensor_bytes: int


def main(argument: str) -> None:
    spec = CopyFloorSpec(**json.loads(argument))
    floor = RawFloor(tensors_state(spec.tensors_count, spec.tensor_bytes), Path())
    floor.prepare()
    cores = floor.threads

    def seconds(threads: int, *, plain: bool) -> float:
        floor.threads = threads
        return median(_timed(lambda: floor.copy(plain=plain)) for _ in range(REPEATS_COUNT))

    answer = {
        "copy kernel": seconds(cores, plain=False),
        "memcpy all cores": seconds(cores, plain=True),
        "memcpy one core": seconds(1, plain=True),
    }
    Path(spec.figures_path).write_text(json.dumps(answer))


def _timed(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main(sys.argv[1])
