"""What trainers lose per checkpoint with their own saving, and with ours.

    .venv-integrations/bin/python -m bench trainers

Hugging Face's Trainer and Lightning train the same model, of linear layers with AdamW, in processes of their own:
without saves, with the trainer's own saving (torch.save and safetensors, blocking and not synced), and with ours
(synced, in the background). In rounds, the order rotated. Lost per checkpoint is the time of all steps, from the end of
the first one to that of the last one, less that of the round's run without saves, divided by the saves; what is still
written when the last step has ended is given apart. Medians of the rounds, and the least and most of them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.report import machine, make_console, print_table, write_json
from bench.rounds import REPOSITORY, scratch_folder

TRAINERS = {"transformers": "Hugging Face Trainer", "lightning": "Lightning"}
KINDS = ("none", "own", "ours")
RUN_S_MAX = 900.0


def run_trainers(
    *, width: int, steps: int, every: int, rounds: int, directory: Path | None, out: Path
) -> dict[str, Any]:
    """Measure, print and write; return the runs by trainer and kind of saving."""
    trainers = [name for name in TRAINERS if find_spec(name)]
    if not trainers:
        raise SystemExit("no trainer is here: make .venv-integrations/.ready, and run it with the Python there")
    runs: dict[str, dict[str, list[dict[str, float]]]] = {name: {kind: [] for kind in KINDS} for name in trainers}
    with scratch_folder(directory) as folder:
        for number in range(rounds):
            for name in trainers:
                shift = number % len(KINDS)
                for kind in KINDS[shift:] + KINDS[:shift]:
                    spec = {"trainer": name, "kind": kind, "width": width, "steps": steps, "every": every}
                    runs[name][kind].append(_run({**spec, "folder": str(folder / f"{name}-{kind}-{number}")}))
                subprocess.run(["rm", "-rf", *map(str, folder.glob(f"{name}-*"))], check=True)
    saves = (steps - 1) // every
    rows = [_row(name, kind, runs[name], saves) for name in trainers for kind in ("own", "ours")]
    size = next(run["bytes"] for name in trainers for run in runs[name]["none"])
    title = f"{size / (1 << 20):.0f} MiB of model and AdamW, {saves} saves in {steps} steps, {rounds} rounds"
    console = make_console()
    columns = ["trainer", "saving", "lost per checkpoint, s", "least", "most", "share of own", "still written, s"]
    print_table(console, title, columns, rows)
    content = {"machine": machine(), "steps": steps, "every": every, "bytes": size, "runs": runs}
    write_json(out.with_suffix(".json"), content)
    out.with_suffix(".txt").write_text(console.export_text(), encoding="utf-8")
    return content


def lost_per_checkpoint(runs: dict[str, list[dict[str, float]]], kind: str, saves: int) -> list[float]:
    """Of each round, against its own run without saves."""
    pairs = zip(runs[kind], runs["none"], strict=True)
    return [(run["steps_s"] - none["steps_s"]) / saves for run, none in pairs]


def _row(name: str, kind: str, runs: dict[str, list[dict[str, float]]], saves: int) -> list[str]:
    lost, own = (lost_per_checkpoint(runs, of, saves) for of in (kind, "own"))
    share = statistics.median(lost) / statistics.median(own)
    rest = statistics.median(run["rest_s"] for run in runs[kind])
    figures = [statistics.median(lost), min(lost), max(lost)]
    return [TRAINERS[name], kind, *(f"{figure:.3f}" for figure in figures), f"{share:.2f}", f"{rest:.2f}"]


def _run(spec: dict[str, Any]) -> dict[str, float]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.trainers_run", json.dumps(spec)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        env=environment,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{spec} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
