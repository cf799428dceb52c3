"""`python -m bench touched`: what saves cost when a small share of the rows was written since the last one.

Eight tables with Adagrad rows and 8 MiB of dense tensors, as recommenders have them. Between two saves a share of the
rows is written, chosen uniformly at random: the worst case, for no two of them are neighbours. Each way of saving has
a process of its own in every round, since arenas belong to the process; rounds are interleaved.

    refresh     a repeated full save; the arena is brought up to date
    copy        a repeated full save that copies everything, refresh=False
    delta       only the rows written since the last save
    raw_floor   one plain copy of everything, one thread of direct writes (peers/raw_floor.py)

Expected, before measuring: the copy moves 2 GiB at 45 ms a GiB. A refresh reads and writes 264 bytes for each written
row in three columns, each a cache miss or two that prefetching hides in part: about 100 ns a row and core, 4 ms for 1 %
of 8 M rows on two cores, plus the dense tensors, 0.4 ms, plus a scan of one mark per row, 8 MB, 0.5 ms. A delta copies
the same rows and writes just them: 264 bytes each, so 21 MB and the dense tensors at 1 %.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.clocks import CpuClock
from bench.marking import MarkingSpec, matmuls_of_a_step
from bench.peers.raw_floor import RawFloor
from bench.report import machine, make_console, write_json
from bench.round import measure_save, step_seconds
from bench.rounds import run_child, scratch_folder
from bench.state import DIM, GIB, ROW_BYTES, TABLES_COUNT, State, Table, dense_tensors, recommender_tables
from bench.touched_report import print_touched
from bench.trainer import MATRIX_SIDE

WAYS = ("refresh", "copy", "delta", "raw_floor")
SHARES = (0.001, 0.01, 0.05, 0.2)
DENSE_BYTES = 8 << 20
DENSE_COUNT = 16
IDS_PER_STEP = 8192
STEP_SECONDS = 0.010
LEARNING_RATE = 0.01


@dataclass(frozen=True)
class TouchedSpec:
    """What one process shall do: all shares, one way. The first save of each share is made, but not reported."""

    directory: str
    figures_path: str
    way: str
    state_bytes: int
    shares: tuple[float, ...]
    saves_count: int
    idle_steps_count: int
    step_seconds: float


def table_state(state_bytes: int) -> State:
    """Eight HashTables of `state_bytes` in all, and the dense tensors."""
    rows_count = max(1000, (state_bytes - DENSE_BYTES) // TABLES_COUNT // ROW_BYTES)
    tables = recommender_tables(rows_count, hashtables=True, filled=True)
    dense = dense_tensors(DENSE_COUNT, DENSE_BYTES // DENSE_COUNT)
    return State(tables=tables, dense=dense, bytes=TABLES_COUNT * rows_count * ROW_BYTES + DENSE_BYTES)


class ShareTrainer:
    """One step: lookup and Adagrad update of some rows out of a fixed random share, and matrix products."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables, self.matmuls = tables, 0
        self._random = np.random.default_rng(5)
        self._gradient = torch.randn(IDS_PER_STEP // TABLES_COUNT, DIM)
        self._left = torch.rand(MATRIX_SIDE, MATRIX_SIDE)
        self._product = torch.empty(MATRIX_SIDE, MATRIX_SIDE)
        self._index = 0

    def choose(self, share: float) -> int:
        """Take another random share of the rows of every table; returns how many rows that are."""
        self._ids = []
        for table in self._tables:
            count = max(1, round(share * len(table.ids)))
            self._ids.append(table.ids.numpy()[self._random.permutation(len(table.ids))[:count]])
        return sum(len(ids) for ids in self._ids)

    def touch_all(self) -> None:
        """Write every row of the share."""
        for table, ids in zip(self._tables, self._ids, strict=True):
            for begin in range(0, len(ids), len(self._gradient)):
                self._update(table, ids[begin : begin + len(self._gradient)])

    def step(self) -> None:
        count = len(self._gradient)
        self._index += 1
        for table, ids in zip(self._tables, self._ids, strict=True):
            begin = self._index * count % max(1, len(ids) - count)
            self._update(table, ids[begin : begin + count])
        for _ in range(self.matmuls):
            torch.mm(self._left, self._left, out=self._product)

    def _update(self, table: Table, ids: Any) -> None:
        rows = table.hashtable.lookup(ids)
        gradient = self._gradient[: len(ids)]
        table.update(rows, gradient, lr=LEARNING_RATE)


class _Ours:
    """A Saver as `measure_save` wants it; `results` are those of the saves."""

    def __init__(self, state: State, spec: TouchedSpec) -> None:
        from asyncckpt import DebugOptions, DeltaPolicy, Saver

        self._kind: Any = "delta" if spec.way == "delta" else "full"
        self._saver = Saver(
            path=spec.directory,
            hashtables=state.hashtables(),
            tensors=state.plain_tensors(),
            keep=1,
            debug=DebugOptions(refresh=spec.way != "copy"),
            deltas=DeltaPolicy(deltas_max=1_000_000, bytes_share_max=1e9) if spec.way == "delta" else None,
        )
        self.results: list[Any] = []
        self._saver.prepare().result()
        self._saver.save_async(0).result()

    def save_async(self, step: int) -> _Ours:
        self._future = self._saver.save_async(step, kind=self._kind)
        return self

    def wait_durable(self) -> None:
        self.results.append(self._future.result())

    def facts(self) -> dict[str, int]:
        last = self.results[-1]
        return {"bytes_written": last.bytes_written, "rows_copied": last.rows_copied, "rows_count": last.rows_count}

    def tidy(self) -> None:
        """Retention has done it."""

    def close(self) -> None:
        self._saver.close()


class _Floor(RawFloor):
    """The raw floor on the columns of the tables."""

    def __init__(self, state: State, spec: TouchedSpec) -> None:
        columns = {f"{t.name}.{name}": column for t in state.tables for name, column in t.columns().items()}
        folder = Path(spec.directory)
        folder.mkdir()
        super().__init__(State(tables=(), dense=columns | dict(state.dense), bytes=state.bytes), folder)
        self.prepare()

    def save_async(self, step: int) -> Any:
        self._newest = Path(self._directory / str(step))
        return super().save_async(step)

    def tidy(self) -> None:
        (self._newest / "image").unlink()

    def facts(self) -> dict[str, int]:
        return {"bytes_written": self.bytes, "rows_copied": 0, "rows_count": 0}


def run_one(spec: TouchedSpec) -> dict[str, Any]:
    """In a process of its own: save at every share."""
    state = table_state(spec.state_bytes)
    trainer = ShareTrainer(state.tables)
    trainer.choose(spec.shares[0])
    trainer.matmuls = matmuls_of_a_step(trainer, spec.step_seconds)
    step_seconds(trainer, 20)
    clock = CpuClock()  # Only threads of training are there yet.
    peer: Any = _Floor(state, spec) if spec.way == "raw_floor" else _Ours(state, spec)
    step = 0
    found = []
    for share in spec.shares:
        rows = trainer.choose(share)
        for number_of in range(spec.saves_count + 1):
            trainer.touch_all()
            step += 1
            figures = measure_save(peer, trainer, clock, step, spec.idle_steps_count)
            if number_of > 0:
                touched = {"touched_rows": rows, "touched_bytes": rows * ROW_BYTES + DENSE_BYTES}
                found.append({"share": share, "save": asdict(figures), **touched, **peer.facts()})
            peer.tidy()
    peer.close()
    return {"way": spec.way, "state_bytes": state.bytes, "saves": found}


def run_touched(
    *,
    gib: float = 2.0,
    rounds: int = 5,
    saves: int = 1,
    zipf: bool = False,
    directory: Path | None = None,
    out: Path,
    smoke: bool = False,
) -> dict[str, Any]:
    """Run it, print the tables, write `out`.json and .txt; return what was measured. `zipf`: the chain of saves too."""
    console = make_console()
    shares: tuple[float, ...] = SHARES
    if smoke:
        gib, rounds, shares = 0.02, 1, (0.01,)
    answers: list[dict[str, Any]] = []
    for index in range(rounds):
        for way in (*WAYS[index % len(WAYS) :], *WAYS[: index % len(WAYS)]):
            with scratch_folder(directory) as folder:
                spec = TouchedSpec(
                    directory=str(folder / "checkpoints"),
                    figures_path=str(folder / "figures.json"),
                    way=way,
                    state_bytes=int(gib * GIB),
                    shares=shares,
                    saves_count=saves,
                    idle_steps_count=5 if smoke else 40,
                    step_seconds=0.0 if smoke else STEP_SECONDS,
                )
                answer, _ = run_child("bench.touched", asdict(spec))
            answers.append({"round": index, **answer})
            words = [f"{one['share']:.1%} {one['save']['stall_seconds'] * 1e3:.2f} ms" for one in answer["saves"]]
            console.print(f"round {index + 1}/{rounds} {way}: stall at {', '.join(words)}", highlight=False)
    content: dict[str, Any] = {"machine": machine(), "row_bytes": ROW_BYTES, "rounds": answers}
    content["marking"] = _marking(gib, directory, smoke=smoke)
    if zipf:
        content["zipf"] = _zipf(gib, directory, smoke=smoke)
    title = f"{gib:g} GiB, medians of {rounds} rounds; floor: the raw floor of the same round and share"
    print_touched(console, content, title)
    write_json(Path(f"{out}.json"), content)
    console.save_text(f"{out}.txt")
    return content


def _marking(gib: float, directory: Path | None, *, smoke: bool) -> dict[str, Any]:
    with scratch_folder(directory) as folder:
        spec = MarkingSpec(
            figures_path=str(folder / "figures.json"),
            state_bytes=int(gib * GIB),
            steps_count=6 if smoke else 600,
            step_seconds=0.0 if smoke else STEP_SECONDS,
        )
        answer, _ = run_child("bench.marking", asdict(spec))
    return dict(answer)


def _zipf(gib: float, directory: Path | None, *, smoke: bool) -> dict[str, Any]:
    from bench.zipf_saves import ZipfSpec

    with scratch_folder(directory) as folder:
        spec = ZipfSpec(
            directory=str(folder / "checkpoints"),
            figures_path=str(folder / "figures.json"),
            state_bytes=int(gib * GIB),
            saves_count=4 if smoke else 20,
            steps_per_save=4 if smoke else 200,
        )
        answer, _ = run_child("bench.zipf_saves", asdict(spec))
    return dict(answer)


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    child_spec = TouchedSpec(**{**arguments, "shares": tuple(arguments["shares"])})
    Path(child_spec.figures_path).write_text(json.dumps(run_one(child_spec)))
