"""This checkout beside another one: a process of each keeps its state and its Saver, and they save in turn.

    python -m bench.beside ../before                          1 GiB of tables and tensors, trainer on one core
    python -m bench.beside ../before --layout many            8,000 tensors of 64 KiB
    python -m bench.beside ../before --layout refresh         full saves, 5 % of the rows written in between; or delta
    python -m bench.beside ../before --trainer-threads all
    python -m bench.beside .                                  beside itself: what differs by chance

The other checkout has a .venv of its own (make .venv/.ready there). A save of one comes right before or behind one of
the other, so what the machine does by the minute reaches both; medians over all saves, and of the ratios of each pair,
with a range that holds the true median with a probability of about 95 %.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

GIB = 1 << 30
SAVES_KEPT = 2
WARM_STEPS, IDLE_STEPS = 20, 20
MANY_COUNT, MANY_BYTES = 8000, 64 << 10
TOUCHED = ("refresh", "delta")
Parts = tuple[Any, Callable[[], Any], Callable[[], None]]  # What trains, opens the Saver, writes before each save.
VALUES = {
    "call ms": ("stall_seconds", 1e3),
    "time lost ms": ("lost_seconds", 1e3),
    "durable ms": ("durable_seconds", 1e3),
    "background CPU ms": ("background_cpu_seconds", 1e3),
}


def work_in_turn(spec: dict[str, Any]) -> None:
    """Be the process of one checkout: save whenever a line comes in, answer with the figures of the save."""
    import torch

    from bench.clocks import CpuClock
    from bench.round import measure_save, step_seconds

    if spec["trainer_threads"] != "all":
        torch.set_num_threads(int(spec["trainer_threads"]))
    folder = Path(spec["directory"])
    folder.mkdir(parents=True)
    make = touched if spec["layout"] in TOUCHED else copied
    work, open_now, touch = make(spec, folder)
    step_seconds(work, WARM_STEPS)
    clock = CpuClock()
    peer = open_now()
    print("ready", flush=True)
    for step, _ in enumerate(sys.stdin, 1):
        touch()
        print(json.dumps(asdict(measure_save(peer, work, clock, step, spec["idle_steps"]))), flush=True)
    peer.close()


def copied(spec: dict[str, Any], folder: Path) -> Parts:
    """The states of `bench state` and `bench many-tensors`: all of it is copied."""
    import asyncckpt
    from bench.peers import open_peer
    from bench.state import recommender_state, tensors_state
    from bench.trainer import PythonLoop, Trainer

    def open_now() -> Any:
        keep = "keep" if "keep" in signature(asyncckpt.Saver).parameters else "keep_latest"  # As older ones called it.
        asyncckpt.Saver = functools.partial(asyncckpt.Saver, **{keep: SAVES_KEPT})  # type: ignore
        peer = open_peer("asyncckpt", state, folder)
        peer.prepare()
        return peer

    if spec["layout"] == "many":
        state = tensors_state(MANY_COUNT, MANY_BYTES)
        return PythonLoop(), open_now, lambda: None
    state = recommender_state(spec["bytes"], hashtables=True)
    return Trainer(state, matmuls=spec["matmuls"]), open_now, lambda: None


def touched(spec: dict[str, Any], folder: Path) -> Parts:
    """The tables of `bench touched`, a share of whose rows is written before each save."""
    import asyncckpt
    from bench.touched import ShareTrainer, TouchedSpec, _Ours, table_state

    state = table_state(spec["bytes"])
    trainer = ShareTrainer(state.tables)
    trainer.matmuls = spec["matmuls"]
    of_round = TouchedSpec(str(folder), "", spec["layout"], spec["bytes"], (), 0, 0, 0.0)

    def touch() -> None:
        trainer.choose(spec["share"])
        trainer.touch_all()

    def open_now() -> _Ours:
        policy = asyncckpt.DeltaPolicy
        asyncckpt.DeltaPolicy = lambda **_: policy(bytes_share_max=1e9)  # type: ignore  # Chains as long as by default.
        peer = _Ours(state, of_round)
        if spec["layout"] == "delta":
            peer._kind = "auto"
        return peer

    touch()
    return trainer, open_now, touch


def begin(checkout: Path, spec: dict[str, Any]) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
    process = subprocess.Popen(
        [str(checkout / ".venv/bin/python"), str(Path(__file__).resolve()), json.dumps(spec)],
        cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise SystemExit(f"the process of {checkout} ended")
    return process


def save_once(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("save\n")
    process.stdin.flush()
    figures: dict[str, Any] = json.loads(process.stdout.readline())
    return figures


def range_of_median(ordered: list[float]) -> tuple[float, float]:
    """Return the bounds between which the true median lies with a probability of about 95 %, by ranks alone."""
    count = len(ordered)
    around = round(0.98 * math.sqrt(count))
    return ordered[max(0, (count - 1) // 2 - around)], ordered[min(count - 1, count // 2 + around)]


def compare(
    other: Annotated[Path, typer.Argument(help="the other checkout, with its .venv")],
    layout: Annotated[str, typer.Option(help="tables, many, refresh or delta")] = "tables",
    gib: Annotated[float, typer.Option(help="size of the state of tables")] = 1.0,
    share: Annotated[float, typer.Option(help="of the rows that are written before a refresh or delta")] = 0.05,
    trainer_threads: Annotated[str, typer.Option(help="1 or all")] = "1",
    saves: Annotated[int, typer.Option(min=1, help="of each")] = 30,
    directory: Annotated[Path | None, typer.Option("--dir", help="where to put checkpoints")] = None,
    out: Annotated[Path | None, typer.Option(help="name of the results without suffix")] = None,
) -> None:
    """Save in turn with both, and print the medians and their ratios."""
    from bench.report import machine, make_console, number, print_table, times, write_json
    from bench.rounds import REPOSITORY, calibrated_matmuls, scratch_folder

    checkouts = {"before": other.resolve(), "after": REPOSITORY}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    console = make_console()
    with scratch_folder(directory) as folder:
        spec = {
            "layout": layout,
            "bytes": int(gib * GIB),
            "share": share,
            "idle_steps": IDLE_STEPS * 25 if layout == "many" else IDLE_STEPS,
            "trainer_threads": trainer_threads,
            "matmuls": calibrated_matmuls(folder, trainer_threads),
        }
        processes = {name: begin(at, spec | {"directory": str(folder / name)}) for name, at in checkouts.items()}
        try:
            for index in range(saves + 1):
                for name in list(processes)[:: 1 if index % 2 else -1]:
                    figures = save_once(processes[name])
                    if index:  # The first of each warms up.
                        found[name].append(figures)
        finally:
            for process in processes.values():
                process.communicate()

    def value(figures: dict[str, Any], label: str) -> float:
        name, factor = VALUES[label]
        return float(figures[name]) * factor

    rows = []
    for label in VALUES:
        ratios = sorted(value(new, label) / value(old, label) for old, new in zip(*found.values(), strict=True))
        medians = (number(median(value(one, label) for one in found[name]), 1) for name in found)
        rows.append([label, *medians, times(median(ratios)), " to ".join(map(times, range_of_median(ratios)))])
    title = f"{layout}, trainer threads {trainer_threads}, medians of {saves} saves of each, in turn"
    print_table(console, title, ["", *found, "median of ratios", "its range"], rows)
    if out is not None:
        write_json(out.with_suffix(".json"), {"machine": machine(), "saves": found})
        console.save_text(str(out.with_suffix(".txt")))


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        work_in_turn(json.loads(sys.argv[1]))
    else:
        typer.run(compare)
