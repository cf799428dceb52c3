"""`python -m bench host-part`: how long `save_async` keeps the calling thread, for a state that has not changed.

Tensors are on the simulated device of the tests: queueing a copy costs other time there than on a real one, a few calls
in all; what is done for every tensor (taking the state apart, looking for its addresses) is the same. A module of
10,000 small parameters and its AdamW are on the host, also with `optimizers=`, and so is one tensor alone. Beside each
figure are those of the same calls one behind the other, when little of what they need has left the caches of the
processor; and beside a thread that runs nothing but bytecode, so that the call has to wait for the interpreter lock
each time that it has given it up. Apart: the parts of a call (docs/decisions/0037-the-walk-is-plain.md).
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import asyncckpt
from asyncckpt.commit.discover import committed_steps, is_committed
from asyncckpt.commit.root import open_root
from asyncckpt.pipeline.threads import IdleEndingThreads
from asyncckpt.plan.leaf_facts import LeafFacts
from asyncckpt.plan.state import flatten
from bench.figures import median_of
from bench.report import machine, make_console, number, print_table, write_json
from bench.rounds import scratch_folder
from tests.simulated_device import SimulatedRuntime

COUNTS = (1, 100, 10_000)
ON_HOST = "1 tensor of the host"
STEPPED = ", in optimizers="
PARAMETERS = 10_000
ELEMENTS = 1000
CALLS = 9
WAIT_S = 300
ALONE, WARM, BESIDE = WAYS = ("after a collection", "one behind the other", "beside bytecode")


def run_host_part(
    *, rounds: int = 5, directory: Path | None = None, out: Path, smoke: bool = False
) -> list[dict[str, Any]]:
    """Run it, print the table, write `out`.json and .txt; return the figures."""
    console = make_console()
    counts, parameters, rounds = ((1, 50), 20, 1) if smoke else (COUNTS, PARAMETERS, rounds)
    states: list[tuple[str, int | None]] = [(f"{count:,} tensors", count) for count in counts]
    module = f"module of {parameters:,} parameters, AdamW"
    states += [(ON_HOST, 0), (module, None), (module + STEPPED, None)]
    figures: list[dict[str, Any]] = []
    with scratch_folder(directory) as folder:
        for index in range(rounds):
            for place, (shown, count) in enumerate(states):
                for way in WAYS if index % 2 else WAYS[::-1]:
                    with state_of(count, parameters) as state:
                        optimizers = [state["optimizer"]] if shown.endswith(STEPPED) else []
                        calls = times_of(state, folder / f"{index}-{place}-{WAYS.index(way)}", optimizers, way)
                        figures.append({"state": shown, "way": way, **calls})
        floors = floors_of(parameters, folder / "0-0-0")
    kinds = [(way, kind) for kind in ("seconds", "processor_seconds") for way in WAYS]
    rows = [[shown, *(number(_median(figures, shown, *kind) * 1e3, 2) for kind in kinds)] for shown, _ in states]
    columns = ["state", *(f"{'ms' if kind == 'seconds' else 'processor ms'}, {way}" for way, kind in kinds)]
    print_table(console, f"save_async, medians of {rounds} rounds of {CALLS} calls", columns, rows)
    rows = [[part, number(seconds * 1e3, 2)] for part, seconds in floors.items()]
    print_table(console, "what a call does not leave out", ["part", "ms"], rows)
    write_json(Path(f"{out}.json"), {"machine": machine(), "calls": figures, "floors": floors})
    console.save_text(f"{out}.txt")
    return figures


@contextmanager
def state_of(count: int | None, parameters: int, device: str = "") -> Iterator[Mapping[str, Any]]:
    """Make so many tensors on a device; 0: one on the host; None: a module and its optimizer there, after a step.

    device: a real one; else tensors are on the simulated one, and the module is on the host.
    """
    if count == 0:
        yield {"tensor": torch.zeros(ELEMENTS)}
        return
    if count is None:
        module = torch.nn.Sequential(*(torch.nn.Linear(4, 4, device=device or None) for _ in range(parameters // 2)))
        optimizer = torch.optim.AdamW(module.parameters())
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        yield {"module": module, "optimizer": optimizer}
        return
    if device:
        yield {f"t{number}": torch.zeros(ELEMENTS, device=device) for number in range(count)}
        return
    runtime = SimulatedRuntime(1, device_bytes=max(32 << 20, 6 * count * ELEMENTS * 4))
    with runtime.installed():
        yield {f"t{number}": runtime.new_tensor((ELEMENTS,), torch.float32) for number in range(count)}


def times_of(
    state: Mapping[str, Any], path: Path, optimizers: Sequence[torch.optim.Optimizer] = (), circumstances: str = ALONE
) -> dict[str, float]:
    """The medians of some calls, but for the first ones, which make what later ones use.

    Each behind a garbage collection, unless they are made one behind the other.
    """
    seconds, processor_seconds = [], []
    device = asyncckpt.DeviceOptions(optimizers=optimizers)
    saving = asyncckpt.Saver(path=path, tensors=state, durability="none", filter_func=_drop, device=device)
    with saving as saver, _bytecode() if circumstances == BESIDE else nullcontext():
        for _ in range(2):
            saver.save_async().result(WAIT_S)
        for _ in range(CALLS):
            if circumstances != WARM:
                gc.collect()
            begun, begun_processor = time.perf_counter(), time.thread_time()
            future = saver.save_async()
            seconds.append(time.perf_counter() - begun)
            processor_seconds.append(time.thread_time() - begun_processor)
            future.result(WAIT_S)
    return {"seconds": median_of(seconds), "processor_seconds": median_of(processor_seconds)}


def floors_of(parameters: int, path: Path) -> dict[str, float]:
    """Return how long what no call leaves out takes by itself, medians of some. path: a checkpoint directory.

    Behind a garbage collection, as the calls: then little of it is in the caches of the processor.
    """
    found: dict[str, list[float]] = {}

    def timed(part: str, work: Callable[..., Any], *arguments: object) -> Any:
        gc.collect()
        begun = time.perf_counter()
        result = work(*arguments)
        found.setdefault(part, []).append(time.perf_counter() - begun)
        return result

    with open_root(path) as root:
        for _ in range(CALLS):
            task = timed("start a thread", IdleEndingThreads("asyncckpt-floor", 1).submit, int)
            timed("look what is committed", lambda: is_committed(root, committed_steps(root)[-1] + 1))
            task.result(WAIT_S)
    of_module = f"module of {parameters:,} parameters, AdamW: "
    with state_of(None, parameters) as state:
        flat = flatten(state)
        facts = LeafFacts(flat.held)
        for _ in range(CALLS):
            timed(of_module + "find its tensors", flatten, state, flat.tree)
            timed(of_module + "compare them with what they were", facts.places, flat.held)
    return {part: median_of(seconds) for part, seconds in found.items()}


@contextmanager
def _bytecode() -> Iterator[None]:
    """Run a thread that gives the interpreter lock up only when it is asked for."""
    is_enough = threading.Event()

    def run() -> None:
        while not is_enough.is_set():
            sum(range(100))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_enough.set()
        thread.join()


def _drop(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
    """Nothing need be written."""
    return []


def _median(figures: list[dict[str, Any]], state: str, way: str, kind: str) -> float:
    return median_of(one[kind] for one in figures if (one["state"], one["way"]) == (state, way))
