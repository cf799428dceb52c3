"""How long the command line takes, beside the start of Python itself.

    python -m bench start

Every command is a process of its own, in rounds: `python -c pass`, then each of them. The medians are reported, and how
much longer than Python alone each of them takes. Those that read or change more than manifests import torch.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import xxhash

import asyncckpt
from asyncckpt.cli.findings import ExitCode
from bench.report import machine, make_console, print_table, write_json
from bench.rounds import scratch_folder

FEW_STEPS = 3


def run_start(*, steps_count: int, rounds: int, directory: Path | None, out: Path) -> None:
    """Measure all commands and print and write what they took."""
    with scratch_folder(directory) as folder:
        few = saved(folder / "few", range(FEW_STEPS))
        many = many_steps(folder / "many", steps_count)
        program = ["-m", "asyncckpt"]
        commands = {
            "python -c pass": ["-c", "pass"],
            "python -c 'import torch'": ["-c", "import torch"],
            "--help": [*program, "--help"],
            "--version": [*program, "--version"],
            f"ls of {FEW_STEPS} steps": [*program, "ls", str(few)],
            "show": [*program, "show", str(few)],
            "tree": [*program, "tree", str(few)],
            f"ls of {steps_count} steps": [*program, "ls", str(many)],
            f"show of {steps_count} steps": [*program, "show", str(many)],
            "verify": [*program, "verify", str(few)],
            "cat": [*program, "cat", str(few), "user", "7"],
            "diff": [*program, "diff", str(few)],
            "doctor": [*program, "doctor", str(few), "--mib", "16"],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(1 + rounds):
            for name, arguments in commands.items():
                seconds[name].append(_seconds_of(arguments, folder / "bytecode"))
    medians = {name: statistics.median(taken[1:]) for name, taken in seconds.items()}
    python = medians["python -c pass"]
    rows = [[name, f"{taken:.3f}", f"{taken - python:.3f}", f"{taken / python:.1f}"] for name, taken in medians.items()]
    print_table(make_console(), "The command line", ["command", "s", "s above python", "times python"], rows)
    write_json(out.with_suffix(".json"), {"machine": machine(), "seconds": seconds})


def saved(path: Path, steps: Sequence[int]) -> Path:
    """Save a small state at some steps."""
    table = asyncckpt.HashTable("user", 4)
    table.lookup(torch.arange(20))
    state = {"model": torch.nn.Linear(3, 3), "epoch": 3}
    with asyncckpt.Saver(path=path, hashtables={"user": table}, tensors=state, durability="none") as saver:
        for step in steps:
            saver.save(step, metadata={"loss": 1 / (1 + step)})
    return path


def many_steps(path: Path, count: int) -> Path:
    """Make a directory of so many steps, the newest two by saving, the others as copies of the first of these."""
    saved(path, [count - 2, count - 1])
    [folder] = (path / "data").glob(f"{count - 2:012d}-*")
    text = (path / "manifests" / f"{count - 2:012d}.json").read_bytes()
    body, mark, _ = text.rpartition(b',"digest":"')
    for step in range(count - 2):
        name = f"{step:012d}"
        own = body.replace(f"{count - 2:012d}".encode(), name.encode())
        own = own.replace(f'"step":{count - 2},'.encode(), f'"step":{step},'.encode())
        digest = xxhash.xxh3_128_hexdigest(own).encode()
        (path / "manifests" / f"{name}.json").write_bytes(own + mark + digest + b'"}\n')
        copy = path / "data" / folder.name.replace(f"{count - 2:012d}", name)
        copy.mkdir()
        for file in folder.iterdir():
            os.link(file, copy / file.name)
    return path


def _seconds_of(arguments: list[str], bytecode: Path) -> float:
    """Return how long a process takes. Modules are compiled once, in the first round, as where they are installed."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(bytecode)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, env=environment)
    seconds = time.perf_counter() - begun
    assert done.returncode in (ExitCode.OK, ExitCode.DIFFERENT), arguments
    return seconds
