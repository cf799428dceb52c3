"""Run rounds: one fresh process for each peer and round, the order rotated, memory sampled from outside."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.clocks import MemorySampler
from bench.figures import RoundFigures
from bench.peers import FLOOR, peer_factory
from bench.round import CALIBRATE, RoundSpec

CHILD_SECONDS_MAX = 1800.0
REPOSITORY = Path(__file__).parents[1]


class RoundFailed(Exception):
    """A child process ended without figures; its last words are the message."""


def run_child(module: str, spec: dict[str, Any], *, sample: bool = False) -> tuple[Any, MemorySampler | None]:
    """Run `python -m module '<spec>'` and return what it wrote to the spec's `figures_path`."""
    figures_path = Path(spec["figures_path"])
    command = [sys.executable, "-m", module, json.dumps(spec)]
    with tempfile.TemporaryFile() as words:
        child = subprocess.Popen(command, cwd=REPOSITORY, stdout=words, stderr=words)
        sampler = MemorySampler(child.pid) if sample else None
        try:
            status = child.wait(CHILD_SECONDS_MAX)
        except BaseException:
            child.kill()
            child.wait()
            raise
        finally:
            if sampler is not None:
                sampler.close()
        if status != 0 or not figures_path.exists():
            words.seek(0)
            raise RoundFailed(f"{module} ended with {status}:\n{words.read()[-4000:].decode(errors='replace')}")
    answer = json.loads(figures_path.read_text())
    figures_path.unlink()
    return answer, sampler


def run_round(spec: RoundSpec) -> RoundFigures:
    """Run one peer for one round in a fresh folder, which is gone afterwards."""
    with scratch_folder(Path(spec.directory)) as folder:
        answer, sampler = run_child("bench.round", asdict(replace(spec, directory=str(folder))), sample=True)
    assert sampler is not None
    figures = RoundFigures.from_json(answer["figures"])
    memory = answer["memory"]
    peak = sampler.peak_bytes(begin=memory["begin"], end=memory["end"])
    return replace(figures, extra_memory_bytes=max(0, peak - int(memory["before_bytes"])))


@contextmanager
def scratch_folder(parent: Path | None) -> Iterator[Path]:
    """Make a folder below `parent` (None: the working directory, since /tmp may be memory); delete it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=parent or Path.cwd()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _settle(folder.parent)


def _settle(folder: Path) -> None:
    """Make the file system finish the deletion now: what it frees would else be written by the next round's fsync."""
    with tempfile.TemporaryFile(dir=folder) as marker:
        marker.write(b"settle")
        marker.flush()
        os.fsync(marker.fileno())


def available_peers(names: Sequence[str], console: Console) -> list[str]:
    """Return the peers that can be imported here; say which cannot."""
    found = []
    for name in names:
        try:
            peer_factory(name)
        except ImportError as error:
            console.print(f"[yellow]{name} is left out: {error}")
        else:
            found.append(name)
    return found


def calibrated_matmuls(directory: Path, trainer_threads: str, **state: Any) -> int:
    """Measure, once for all peers, how many products make the ten milliseconds of a step; of a stepped state, three
    quarters of one.
    """
    spec = RoundSpec(
        peer=CALIBRATE,
        directory=str(directory),
        figures_path=str(directory / "calibration.json"),
        trainer_threads=trainer_threads,
        **state,
    )
    answer, _ = run_child("bench.round", asdict(spec))
    return int(answer["matmuls"])


def run_rounds(
    peers: Sequence[str], rounds_count: int, make_spec: Callable[[str, int], RoundSpec], console: Console
) -> list[RoundFigures]:
    """Run all peers in every round, each round in another order; a peer that fails is told and leaves no figures."""
    figures: list[RoundFigures] = []
    for index in range(rounds_count):
        shift = index % len(peers)
        for peer in (*peers[shift:], *peers[:shift]):
            label = f"round {index + 1}/{rounds_count} {peer}"
            try:
                one = run_round(make_spec(peer, index))
            except RoundFailed as error:
                console.print(f"[red]{label}: {error}", highlight=False)
                continue
            figures.append(one)
            console.print(f"{label}: {_short(one)}", highlight=False)
    if FLOOR in peers and not any(one.peer == FLOOR for one in figures):
        raise RoundFailed("the raw floor gave no figures, so nothing can be held against it")
    return figures


def _short(one: RoundFigures) -> str:
    if not one.saves:
        return f"image {one.image or 'not checked'}"
    save = one.saves[-1]
    words = f"stall {save.stall_seconds:.3f} lost {save.lost_seconds:.3f} durable {save.durable_seconds:.3f} s"
    return words + (f" image {one.image}" if one.image else "")
