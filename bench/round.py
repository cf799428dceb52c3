"""One round in a process of its own: one peer trains, saves a few times, loads, and may prove its image.

1. Make the state, train a while (memory, caches and OpenMP threads are warm), then look at memory and threads.
2. `prepare()`.
3. For each save: idle steps, `save_async`, steps until the save is durable, idle steps again. The median of the idle
   steps before and after is the measure of one step, so a machine that drifts moves both sides.
4. Load the last checkpoint into a target made and touched before: cold, then warm.
5. With `verify`: copy the state aside, save at once, train until durable, load and compare bit for bit.

    python -m bench.round '{"peer": "raw_floor", ...}'     prints nothing; the figures go to the file `figures_path`
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from asyncckpt.errors import UsageError
from bench.clocks import CpuClock, cached_share, drop_page_cache, files_bytes, resident_bytes
from bench.figures import NAN, RoundFigures, SaveFigures
from bench.peers import open_peer, peer_factory
from bench.peers.protocol import DURABLE_SECONDS_MAX, Handle, Peer
from bench.state import State, differences, recommender_state, stepped_state, tensors_state
from bench.trainer import PhasedTrainer, PythonLoop, Trainer, Work, calibrate, phases_matmuls

CALIBRATE = "calibrate"


@dataclass(frozen=True)
class RoundSpec:
    """What one process shall do; it travels as JSON on the command line."""

    peer: str
    directory: str
    figures_path: str
    round_index: int = 0
    trainer_threads: str = "all"
    layout: str = "tables"  # or "many": `tensors_count` equal tensors; or "stepped": the same, of an optimizer
    tensors_count: int = 0
    work: str = "train"  # or "python": bytecode only
    state_bytes: int = 0
    matmuls: int = 1
    saves_count: int = 3
    idle_steps_count: int = 40
    warmup_steps_count: int = 20
    load: bool = True
    verify: bool = False

    def make_state(self, *, filled: bool = True) -> State:
        if self.layout == "stepped":
            return stepped_state(self.tensors_count, self.state_bytes // self.tensors_count)
        if self.layout == "many":
            return tensors_state(self.tensors_count, self.state_bytes // self.tensors_count)
        return recommender_state(self.state_bytes, hashtables=peer_factory(self.peer).hashtables, filled=filled)

    def make_work(self, state: State) -> Work:
        if self.layout == "stepped":
            return PhasedTrainer(state, matmuls=self.matmuls)
        return Trainer(state, matmuls=self.matmuls) if self.work == "train" else PythonLoop()


class Durable:
    """Waits for a save in a thread and keeps the time at which it became durable."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._error: BaseException | None = None
        self._at = 0.0
        self._thread = threading.Thread(target=self._run, name="durable")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._handle.wait_durable()
        except BaseException as error:
            self._error = error
        self._at = time.perf_counter()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> float:
        self._thread.join(DURABLE_SECONDS_MAX)
        if self._error is not None:
            raise self._error
        return self._at


def step_seconds(work: Work, count: int) -> list[float]:
    """Do `count` steps and return the time of each; they are measured end to end, so nothing falls between two."""
    times = [time.perf_counter()]
    for _ in range(count):
        work.step()
        times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def measure_save(peer: Peer, work: Work, clock: CpuClock, step: int, idle_steps_count: int) -> SaveFigures:
    """Save once while training goes on."""
    idle = step_seconds(work, idle_steps_count)
    begin = time.perf_counter()
    handle = peer.save_async(step)
    returned = time.perf_counter()
    cpu_begin = clock.background_seconds()
    durable = Durable(handle)
    times = [time.perf_counter()]
    while not durable.done():
        work.step()
        times.append(time.perf_counter())
    cpu_end = clock.background_seconds()
    durable_at = durable.result()
    idle += step_seconds(work, idle_steps_count)
    step_idle = median(idle)
    steps = [after - before for before, after in pairwise(times)]
    return SaveFigures(
        stall_seconds=returned - begin,
        lost_seconds=times[-1] - begin - step_idle * len(steps),
        durable_seconds=durable_at - begin,
        background_cpu_seconds=cpu_end - cpu_begin,
        steps_count=len(steps),
        step_idle_seconds=step_idle,
        step_idle_mean_seconds=sum(idle) / len(idle),
        step_busy_seconds=sum(steps) / len(steps) if steps else NAN,
        step_worst_seconds=max(steps, default=NAN),
    )


def image_verdict(peer: Peer, work: Work, state: State, target: State, step: int) -> str:
    """Save while the state is mutated from the moment that the call returns; say whether the image is the cut."""
    reference = state.copy()
    handle = peer.save_async(step)
    durable = Durable(handle)
    work.step()
    while not durable.done():
        work.step()
    try:
        durable.result()
    except UsageError as error:  # Of a control, without the wait of steps.
        return f"refused: {error.what}"
    target.clear()
    peer.load(step, target)
    wrong = differences(target.copy(), reference)
    return "ok" if not wrong else f"torn: {len(wrong)} of {len(reference)} tensors, {wrong[0]!r} first"


def timed(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def run_round(spec: RoundSpec) -> tuple[RoundFigures, dict[str, float]]:
    """Run one round; return its figures, and when and from where the parent shall look at memory."""
    if spec.trainer_threads != "all":
        torch.set_num_threads(int(spec.trainer_threads))
    directory = Path(spec.directory)
    state = spec.make_state()
    work = spec.make_work(state)
    peer_factory(spec.peer)  # Its imports are no part of what a save costs.
    step_seconds(work, spec.warmup_steps_count)
    clock = CpuClock()
    memory = {"begin": time.monotonic(), "before_bytes": float(resident_bytes(os.getpid()))}

    peer = open_peer(spec.peer, state, directory)
    prepare_seconds = timed(peer.prepare)
    saves = [measure_save(peer, work, clock, step + 1, spec.idle_steps_count) for step in range(spec.saves_count)]
    memory["end"] = time.monotonic()
    written_bytes = files_bytes(directory) // max(1, spec.saves_count)

    target = spec.make_state(filled=False) if spec.load or spec.verify else None
    cold = warm = cached = NAN
    if target is not None and spec.load and saves:
        drop_page_cache(directory)
        cached = cached_share(directory)
        cold = timed(lambda: peer.load(len(saves), target))
        warm = timed(lambda: peer.load(len(saves), target))
    image = image_verdict(peer, work, state, target, len(saves) + 1) if target is not None and spec.verify else ""
    peer.close()
    figures = RoundFigures(
        peer=spec.peer,
        round_index=spec.round_index,
        trainer_threads=spec.trainer_threads,
        state_bytes=state.bytes,
        files_bytes=written_bytes,
        prepare_seconds=prepare_seconds,
        saves=tuple(saves),
        extra_memory_bytes=0,  # The parent knows.
        load_cold_seconds=cold,
        load_warm_seconds=warm,
        cold_cached_share=cached,
        image=image,
    )
    return figures, memory


def main(argument: str) -> None:
    spec = RoundSpec(**json.loads(argument))
    if spec.peer == CALIBRATE:
        if spec.trainer_threads != "all":
            torch.set_num_threads(int(spec.trainer_threads))
        stepped = spec.layout == "stepped"
        matmuls = phases_matmuls(spec.make_state()) if stepped else calibrate(seconds=0.010)
        answer: dict[str, object] = {"matmuls": matmuls}
    else:
        figures, memory = run_round(spec)
        answer = {"figures": asdict(figures), "memory": memory}
    Path(spec.figures_path).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
