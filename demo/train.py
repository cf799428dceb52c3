"""The training process: `python -m demo.train SPEC`, where SPEC is a RunSpec as JSON; events go to standard output.

Everything in it is deterministic: with the same spec, two runs end with the same bits, also when one of them was killed
and resumed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from demo.batches import BatchSampler
from demo.digests import digests
from demo.events import Event, RunEnded, StepsDone, encode_event
from demo.log import Log
from demo.model import Recommender
from demo.savers import SAVERS, RunSaver, Tell, resume
from demo.spec import RunSpec

STEPS_PER_EVENT = 10


class StepLog:
    """Collects step times and tells them a few at a time, so that telling costs the loop nothing."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._begins: list[float] = []
        self._seconds: list[float] = []

    def add(self, step: int, *, begin: float, seconds: float, loss: float, flush: bool) -> None:
        self._begins.append(begin)
        self._seconds.append(seconds)
        if flush or len(self._begins) == STEPS_PER_EVENT:
            first = step - len(self._begins) + 1
            self._tell(StepsDone(first=first, begins=tuple(self._begins), seconds=tuple(self._seconds), loss=loss))
            self._begins, self._seconds = [], []


def train(spec: RunSpec, tell: Tell) -> None:
    """Train from the newest checkpoint, or from the start, to the last step."""
    torch.set_num_threads(spec.threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # What deterministic products on a GPU ask for.
    torch.use_deterministic_algorithms(True)
    log = Log.load(Path(spec.log_path))
    recommender = Recommender(
        dim=spec.dim,
        seed=spec.seed,
        cold_rows_count=spec.cold_rows_count,
        device=spec.device,
        cache_rows=spec.cache_rows,
    )
    sampler = BatchSampler(
        log, seed=spec.seed, size=spec.batch_size, window=spec.window, negatives_count=spec.negatives_count
    )
    resumed_step = resume(spec, recommender, tell)
    started = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - started

    saver: RunSaver = SAVERS[spec.saver](spec, recommender, tell=tell, clock=clock)
    saver.begin()
    started = time.perf_counter()
    steps = StepLog(tell)
    for step in range(resumed_step + 1, spec.steps + 1):
        begin = clock()
        loss = recommender.train(sampler.batch(step), step)
        last = step == spec.steps
        steps.add(step, begin=begin, seconds=clock() - begin, loss=loss, flush=last)
        if not last:
            saver.after_step(step)
    saver.finish(spec.steps)
    tell(RunEnded(digests=digests(recommender)))


def tell_parent(event: Event) -> None:
    print(encode_event(event), flush=True)


if __name__ == "__main__":
    train(RunSpec.from_json(sys.argv[1]), tell_parent)
