"""What rows by index cost: copy_rows beside one plain copy of the whole column, marks, and fingerprints.

    python -m bench.rows                      columns of 512 MiB
    python -m bench.rows --column-mib 8       a quick look
    python -m bench.rows --out results        also write results.json and results.txt

Expected, before measuring: a plain copy is bound by the memory's bandwidth, some 25 GB/s here, so a 512 MiB column
takes 20 ms. Rows at random are bound by misses: one line in the source and one in the target, a dozen of 80 ns in
flight, are 10 ns a row of 64 bytes. That is 4 times what the row costs in a plain copy, so the break-even lies near
25 %. For rows of 1 KiB the bandwidth counts again and it lies near 50 %; for rows of 8 bytes, which move whole lines,
near 4 %.

Measured on 2 cores of an AMD EPYC, other work running beside it (the quietest of seven runs, by its plain copies):

    row bytes                                8     64    128    256   1024
    copy_rows of 1 % / plain copy         0.21   0.04   0.03   0.03   0.03
    break-even                            5.8 %   44 %   46 %  > 50 %  > 50 %

    million rows a second: mark 678, marked 26800 with 0.1 % of the rows marked and 8500 with 1 %

Where rows are far apart (0.1 %) one costs up to six times as much; most likely it also misses in the page tables.
Rows of 64 bytes and more are better than the sketch, since their stores do not read the target.

Every round draws other rows, ascending, so that none are in the caches from the round before, and measures one plain
copy beside all shares. A figure is the median over the rounds. The break-even is the share where rows and plain copy
take equally long, on straight lines between the shares that were measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from asyncckpt.native import Memory, core
from bench.figures import median_of
from bench.report import machine, make_console, number, print_table, write_json

ROW_BYTES = (8, 64, 128, 256, 1024)
SHARES = (0.001, 0.01, 0.05, 0.20, 0.50)
MARKS_PER_MIB = 20_000
MARKED_SHARES = (0.0, 0.001, 0.01, 0.1)
PRINTED_COLUMNS = ((8,), (64,), (256,), (8, 256, 256), (1024,))
PRINTED_PART = 4  # The columns of a print together are this part of the column that is copied.
BATCH_ROWS = 65_536


@dataclass(frozen=True)
class CopyRound:
    """One size and share in one round, in seconds."""

    round_index: int
    row_bytes: int
    share: float
    rows_count: int
    rows_seconds: float
    plain_seconds: float


@dataclass(frozen=True)
class Rate:
    """Median over the rounds, in the unit's items per second."""

    name: str
    value: float
    unit: str


def seconds_of(body: Callable[[], object]) -> float:
    begin = time.perf_counter()
    body()
    return time.perf_counter() - begin


def touched_memory(bytes: int) -> Memory:
    memory = core.map_memory(bytes)
    memory.view()[:] = 1
    return memory


def measure_copies(*, column_bytes: int, rounds: int, threads: int, random: np.random.Generator) -> list[CopyRound]:
    source, target = touched_memory(column_bytes), touched_memory(column_bytes)
    whole = np.array([[source.address, target.address, column_bytes]], dtype=np.uint64)
    figures = []
    for index in range(rounds):
        for row_bytes in ROW_BYTES:
            column = np.array([[source.address, target.address, row_bytes]], dtype=np.uint64)
            drawn = [np.flatnonzero(random.random(column_bytes // row_bytes) < share) for share in SHARES]
            plain_seconds = seconds_of(lambda: core.copy(whole, threads=threads))
            for share, rows in zip(SHARES, drawn, strict=True):
                taken = seconds_of(lambda: core.copy_rows(column, rows, rows, threads=threads))  # noqa: B023
                figures.append(CopyRound(index, row_bytes, share, len(rows), taken, plain_seconds))
    return figures


def break_even(points: list[tuple[float, float]]) -> float | None:
    """The share at which the ratio of rows to plain copy is 1; None: at none of the shares measured."""
    for (share, ratio), (next_share, next_ratio) in pairwise([(0.0, 0.0), *points]):
        if next_ratio >= 1.0:
            return share + (next_share - share) * (1.0 - ratio) / (next_ratio - ratio)
    return None


def measure_marks(*, marks_count: int, rounds: int, threads: int, random: np.random.Generator) -> list[Rate]:
    marks = np.zeros(marks_count, dtype=np.uint8)
    batches = [random.integers(0, marks_count, BATCH_ROWS) for _ in range(max(1, marks_count // BATCH_ROWS))]

    def mark_all(rows_of: list[NDArray[np.int64]]) -> None:
        for rows in rows_of:
            core.mark(marks, rows, 1)

    unit = "rows/s"
    seconds = [seconds_of(lambda: mark_all(batches)) for _ in range(rounds)]
    rates = [Rate("mark, batches of 65536 random rows", len(batches) * BATCH_ROWS / median_of(seconds), unit)]
    for share in MARKED_SHARES:
        marks[:] = random.random(marks_count) < share
        seconds = [seconds_of(lambda: core.marked(marks, 0, threads=threads)) for _ in range(rounds)]
        rates.append(Rate(f"marked, {share:.1%} of {marks_count} rows", marks_count / median_of(seconds), unit))
    return rates


def measure_prints(*, bytes: int, rounds: int, random: np.random.Generator) -> list[Rate]:
    rates = []
    for sizes in PRINTED_COLUMNS:
        rows_count = bytes // sum(sizes)
        columns = [random.integers(0, 256, (rows_count, size), dtype=np.uint8) for size in sizes]
        table = np.array([(column.ctypes.data, column.shape[1]) for column in columns], dtype=np.uint64)
        seconds = [seconds_of(lambda: core.fingerprints(table, rows_count)) for _ in range(rounds)]  # noqa: B023
        name = "fingerprints on one core, rows of " + " + ".join(map(str, sizes))
        rates.append(Rate(name, rows_count / median_of(seconds), "rows/s"))
    return rates


def ratio_of(copies: list[CopyRound], *, row_bytes: int, share: float) -> float:
    """Median over the rounds of copy_rows beside the plain copy of the same round."""
    of_share = [one for one in copies if (one.row_bytes, one.share) == (row_bytes, share)]
    return median_of(one.rows_seconds / one.plain_seconds for one in of_share)


def print_copies(console: Console, title: str, copies: list[CopyRound], even: dict[int, float | None]) -> None:
    lines = []
    for row_bytes in ROW_BYTES:
        for share in SHARES:
            of_share = [one for one in copies if (one.row_bytes, one.share) == (row_bytes, share)]
            figures = [
                number(median_of(one.rows_seconds for one in of_share) * 1e3),
                number(median_of(one.plain_seconds for one in of_share) * 1e3, 1),
                number(ratio_of(copies, row_bytes=row_bytes, share=share)),
                number(median_of(one.rows_count / one.rows_seconds for one in of_share) / 1e6, 1),
            ]
            lines.append([str(row_bytes), f"{share:.1%}", *figures])
    columns = ["row bytes", "share", "copy_rows ms", "plain copy ms", "copy_rows / plain", "million rows/s"]
    print_table(console, title, columns, lines)
    shown = [[str(size), f"over {SHARES[-1]:.0%}" if share is None else f"{share:.1%}"] for size, share in even.items()]
    print_table(console, "copy_rows is faster below this share of the rows", ["row bytes", "break-even"], shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--column-mib", type=int, default=512, help="size of a column (default 512 MiB)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="threads of the core; 0 = all cores")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the figures to <out>.json and <out>.txt too")
    arguments = parser.parse_args()
    random, rounds, threads = np.random.default_rng(arguments.seed), arguments.rounds, arguments.threads
    copies = measure_copies(column_bytes=arguments.column_mib << 20, rounds=rounds, threads=threads, random=random)
    rates = measure_marks(
        marks_count=arguments.column_mib * MARKS_PER_MIB, rounds=rounds, threads=threads, random=random
    )
    rates += measure_prints(bytes=(arguments.column_mib << 20) // PRINTED_PART, rounds=rounds, random=random)

    even = {
        size: break_even([(share, ratio_of(copies, row_bytes=size, share=share)) for share in SHARES])
        for size in ROW_BYTES
    }
    console = make_console()
    title = f"rows at random out of {arguments.column_mib} MiB, medians of {rounds} rounds, seed {arguments.seed}"
    print_copies(console, title, copies, even)
    shown = [[rate.name, number(rate.value / 1e6, 1)] for rate in rates]
    print_table(console, "marks and fingerprints", ["what", "million rows/s"], shown)
    if arguments.out is not None:
        content = {
            "machine": machine(),
            "core": {"implementation": core.implementation, "cpu_variant": core.cpu_variant, "threads": threads},
            "column_mib": arguments.column_mib,
            "rounds": [asdict(one) for one in copies],
            "break_even": {str(size): share for size, share in even.items()},
            "rates": [asdict(rate) for rate in rates],
        }
        write_json(Path(f"{arguments.out}.json"), content)
        console.save_text(f"{arguments.out}.txt")


if __name__ == "__main__":
    main()
