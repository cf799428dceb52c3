"""Conversion from RecIS and back, beside a plain copy of the same files.

    python -m bench recis

Each conversion is a process of its own, `asyncckpt import recis` and `asyncckpt export recis`, and so is the copy,
which syncs every file as they do. In rounds, the one after the other, the copy first and last; medians are reported,
how fast each is as a share of the copy, and the most memory that its process had (VmHWM: what it allocated, and what it
has mapped of files and libraries; what the kernel caches of files beside that is not counted). Seconds are those of the
work, without the start of Python; CPU seconds are all of the process. The source is in the page cache, where it fits.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import asyncckpt
from asyncckpt.formats import recis
from bench.report import machine, make_console, print_table, write_json
from bench.rounds import scratch_folder

DIM = 16
SHARDS = 8
FILL_ROWS = 1_000_000
COPY = """
import json, os, shutil, sys, time
source, target = sys.argv[1:]
begun = time.perf_counter()
os.mkdir(target)
for name in os.listdir(source):
    shutil.copyfile(os.path.join(source, name), os.path.join(target, name))
    with open(os.path.join(target, name), "rb+") as file:
        os.fsync(file.fileno())
print(json.dumps({"seconds": time.perf_counter() - begun}))
"""
# The most memory since the program began: what wait4 gives counts that of the process it was forked from.
MEASURED = """
import os, runpy, sys
try:
    if sys.argv[1] == "-c":
        sys.argv = sys.argv[2:]
        exec(sys.argv[0])
    else:
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except SystemExit as ended:
    if ended.code:
        raise
with open("/proc/self/status") as status:
    [line] = [line for line in status if line.startswith("VmHWM:")]
print(line.split()[1], sum(os.times()[:2]))
"""


@dataclass(frozen=True)
class Run:
    """What one process took."""

    seconds: float
    memory_mib: float
    cpu_seconds: float


def run_recis(*, rows: int, rounds: int, directory: Path | None, out: Path) -> dict[str, list[Run]]:
    """Measure, print and write; return the runs by what they did."""
    with scratch_folder(directory) as folder:
        source = folder / "ckpt_1"
        size = _made(folder, source, rows)
        optimizer = ("--optimizer", "sparse_adam")
        runs: dict[str, list[Run]] = {}
        for number in range(rounds):
            into, back = folder / f"run-{number}", folder / f"back-{number}"
            export = ["asyncckpt", "export", "recis", into]
            into_run = ["asyncckpt", "import", "recis", source, into]
            for name, command in (
                ("copy", ["-c", COPY, source, folder / f"copy-{number}"]),
                ("import", [*into_run, "--no-verify", "--json"]),
                ("export", [*export, back, *optimizer, "--no-verify", "--json"]),
                ("import, read once more", [*into_run, "--step", "2", "--json"]),
                ("export, read once more", [*export, f"{back}-read", *optimizer, "--json"]),
                ("export to 3 shards", [*export, f"{back}-3", *optimizer, "--shards", "3", "--json"]),
                ("copy", ["-c", COPY, source, folder / f"copy-{number}-again"]),
            ):
                runs.setdefault(name, []).append(_run(list(map(str, command))))
            subprocess.run(["rm", "-rf", *map(str, folder.glob(f"*-{number}*"))], check=True)
    floor = statistics.median(run.seconds for run in runs["copy"])
    lines = []
    for name, own in runs.items():
        of_all = ("seconds", "memory_mib", "cpu_seconds")
        taken, memory, cpu = (statistics.median(getattr(run, what) for run in own) for what in of_all)
        speeds = [f"{taken:.2f}", f"{size / taken / (1 << 20):.0f}", f"{floor / taken:.2f}"]
        lines.append([name, *speeds, f"{cpu:.1f}", f"{memory:.0f}"])
    title = f"{rows:,} rows, {size / (1 << 30):.2f} GiB in {SHARDS} shards, medians of {rounds} rounds"
    console = make_console()
    print_table(console, title, ["what", "s", "MiB/s", "times the copy's speed", "CPU s", "memory MiB"], lines)
    content = {
        "machine": machine(),
        "rows": rows,
        "bytes": size,
        "runs": {n: [vars(r) for r in own] for n, own in runs.items()},
    }
    write_json(out.with_suffix(".json"), content)
    out.with_suffix(".txt").write_text(console.export_text(), encoding="utf-8")
    return runs


def _made(folder: Path, source: Path, rows: int) -> int:
    """Make a directory of RecIS; return its bytes."""
    slots = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    table = asyncckpt.HashTable("user", DIM, optimizer_slots=slots, capacity=rows)
    for begin in range(0, rows, FILL_ROWS):
        ids = torch.arange(begin, min(begin + FILL_ROWS, rows)) * 2_654_435_761
        table.insert(ids, torch.randn(len(ids), DIM))
    asyncckpt.save(folder / "made", {"weight": torch.randn(1000, 1000)}, 1, hashtables={"user": table})
    recis.export_checkpoint(folder / "made", source, shards=SHARDS, optimizer="sparse_adam", verify=False)
    subprocess.run(["rm", "-rf", str(folder / "made")], check=True)
    return sum(path.stat().st_size for path in source.iterdir())


def _run(command: list[str]) -> Run:
    done = subprocess.run([sys.executable, "-c", MEASURED, *command], stdout=subprocess.PIPE, text=True, check=True)
    *answer, last = done.stdout.splitlines()
    memory_kib, cpu_seconds = last.split()
    seconds = json.loads("".join(answer))["seconds"]
    return Run(seconds=seconds, memory_mib=int(memory_kib) / 1024, cpu_seconds=float(cpu_seconds))
