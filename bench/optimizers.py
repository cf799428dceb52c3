"""How many rows a second an optimizer of tables updates, beside torch's for sparse gradients and FBGEMM's on the CPU.

    python -m bench optimizers

A step updates 16,384 distinct rows, drawn evenly, of a table of 2 million rows of float32: every row is a cache miss in
each of its columns. All contestants get the same gradient, one row per id, without repeats, in the order of ids. Ours
also finds the rows of the ids and marks them; `rows known` is the update alone, of the same rows in the same order as
the others get. FBGEMM's operator updates in the backward, so its figure is that of a backward of one id per bag, which
also copies the gradient; it is there where fbgemm_gpu is installed.

Expected, before measuring: with 32 columns, Adagrad reads and writes 4 lines of 64 bytes a row and Adam 6, and
prefetching keeps about ten misses under way: 50 to 100 ns a row. torch.optim.SparseAdam builds two sparse tensors and
walks the rows six times. To find a row by its id is one miss more, and to mark it another: row-wise Adagrad of 16
columns has two without them.

Rounds are interleaved, in a new order each; a figure is the median of all steps. With one thread, which is the default,
time is that of this thread alone, so that neighbours disturb less; with more (`--threads`) it is that of the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from asyncckpt.native import FLOAT32, FloatRows, RowUpdate, Rule, core
from asyncckpt.tables import HashEmbedding, HashTable, SparseAdagrad, SparseAdam, SparseFTRL, SparseSGD
from asyncckpt.tables.gradients import PendingRows
from asyncckpt.tables.row_device import row_device
from asyncckpt.tables.sparse_optimizer import SparseOptimizer
from bench.report import machine, make_console, number, print_table, times, write_json
from bench.targets import Target, print_targets

ROWS_COUNT, IDS_PER_STEP, STEPS_PER_ROUND = 2_000_000, 16_384, 20
SMOKE_ROWS_COUNT, SMOKE_IDS_PER_STEP = 2_000, 256
LEARNING_RATE = 0.01
OURS, KNOWN, TORCH, FBGEMM = f"asyncckpt ({core.implementation})", "rows known", "torch", "FBGEMM"
TIMES_TORCH, TIMES_FBGEMM = 2.0, 0.9

# Takes the rows (int64 [n], ascending) and their gradient; returns the seconds of the update alone.
Step = Callable[[np.ndarray, torch.Tensor], float]

SPARSE: dict[str, tuple[type[SparseOptimizer], bool, dict[str, float]]] = {
    "SGD": (SparseSGD, False, {}),
    "Adagrad": (SparseAdagrad, False, {}),
    "row-wise Adagrad": (SparseAdagrad, True, {}),
    "Adam": (SparseAdam, False, {}),
    "row-wise Adam": (SparseAdam, True, {}),
    "FTRL": (SparseFTRL, False, {"l1": 0.001}),
}
DENSE: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=LEARNING_RATE),
    "Adam": lambda parameters: torch.optim.SparseAdam(parameters, lr=LEARNING_RATE),
}
RULES: dict[str, tuple[Rule, tuple[float, ...]]] = {
    "SGD": (Rule.SGD, (LEARNING_RATE, 0, 0, 0)),
    "Adagrad": (Rule.ADAGRAD, (LEARNING_RATE, 0, 1e-8)),
    "row-wise Adagrad": (Rule.ADAGRAD, (LEARNING_RATE, 0, 1e-8)),
}
FUSED = {"SGD": "EXACT_SGD", "Adagrad": "EXACT_ADAGRAD", "row-wise Adagrad": "EXACT_ROWWISE_ADAGRAD"}


@dataclass(frozen=True)
class Figure:
    """Median over all steps, in millions of rows a second."""

    rule: str
    contestant: str
    dim: int
    mrows_per_s: float


def clock() -> float:
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def our_step(rule: str, rows_count: int, dim: int) -> Step:
    kind, rowwise, numbers = SPARSE[rule]
    table = HashTable("bench", dim, optimizer_slots=kind.optimizer_slots(rowwise=rowwise), capacity=rows_count)
    # Scattered, as hashed ids are: the n-th id has row n.
    ids = np.random.default_rng(1).permutation(rows_count).astype(np.int64) * 7919
    table.lookup(ids)
    module = HashEmbedding(table)
    optimizer = kind(module, lr=LEARNING_RATE, **numbers)  # type: ignore[arg-type,call-arg]  # of that kind

    def step(rows: np.ndarray, gradient: torch.Tensor) -> float:
        distinct = np.sort(ids[rows])
        leaf = gradient.new_empty(1).expand(gradient.shape)
        leaf.grad = gradient
        module.pending.put(PendingRows(forward_index=0, ids=distinct, leaf=leaf))
        begin = clock()
        optimizer.step()
        return clock() - begin

    return step


def our_update(rule: str, rows_count: int, dim: int) -> Step:
    _, rowwise, _ = SPARSE[rule]
    new_column = row_device(torch.device("cpu")).new_column
    widths = [dim, *(() if rule == "SGD" else (1 if rowwise else dim,))]
    columns = [new_column((rows_count, width), dtype=torch.float32).zero_() for width in widths]

    def step(rows: np.ndarray, gradient: torch.Tensor) -> float:
        places = [FloatRows(one.data_ptr(), width=one.shape[1], kind=FLOAT32) for one in (gradient, *columns)]
        number, numbers = RULES[rule]
        update = RowUpdate(
            rule=number,
            numbers=numbers,
            gradient=places[0],
            weight=places[1],
            slots=tuple(places[2:]),
            rows_count=rows_count,
            rowwise=rowwise,
        )
        begin = clock()
        core.update_rows(update, rows, threads=torch.get_num_threads())
        return clock() - begin

    return step


def torchs_step(rule: str, rows_count: int, dim: int) -> Step:
    weight = torch.zeros(rows_count, dim, requires_grad=True)
    optimizer = DENSE[rule]([weight])

    def step(rows: np.ndarray, gradient: torch.Tensor) -> float:
        index = torch.from_numpy(rows).unsqueeze(0)
        shape = rows_count, dim
        weight.grad = torch.sparse_coo_tensor(index, gradient, shape, is_coalesced=True, check_invariants=False)
        begin = clock()
        optimizer.step()
        return clock() - begin

    return step


def fbgemms_step(rule: str, rows_count: int, dim: int) -> Step:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType  # type: ignore[import-not-found,unused-ignore]
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (  # type: ignore[import-not-found,unused-ignore]
        EmbeddingLocation,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # type: ignore[import-not-found,unused-ignore]
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    tables = [(rows_count, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)]
    kind = getattr(EmbOptimType, FUSED[rule])
    bags: Any = SplitTableBatchedEmbeddingBagsCodegen(tables, optimizer=kind, learning_rate=LEARNING_RATE)

    def step(rows: np.ndarray, gradient: torch.Tensor) -> float:
        pooled = bags(torch.from_numpy(rows), torch.arange(len(rows) + 1))
        begin = clock()
        pooled.backward(gradient)
        return clock() - begin

    return step


def contestants(rule: str) -> dict[str, Callable[[str, int, int], Step]]:
    found: dict[str, Callable[[str, int, int], Step]] = {OURS: our_step}
    if rule in DENSE:
        found[TORCH] = torchs_step
    if rule in FUSED:
        found[KNOWN] = our_update
    if rule in FUSED and find_spec("fbgemm_gpu") is not None:
        found[FBGEMM] = fbgemms_step
    return found


def measure(rule: str, *, dim: int, rows_count: int, ids_count: int, rounds: int) -> list[Figure]:
    random = np.random.default_rng(3)
    steps = {name: make(rule, rows_count, dim) for name, make in contestants(rule).items()}
    batches = [np.sort(random.choice(rows_count, ids_count, replace=False)) for _ in range(STEPS_PER_ROUND)]
    gradient = torch.randn(ids_count, dim)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds + 1):
        for name in random.permutation(list(steps)).tolist():
            found = [steps[name](rows, gradient) for rows in batches]
            if index:  # The first round touches the memory.
                seconds[name] += found
    return [Figure(rule, name, dim, ids_count / median(found) / 1e6) for name, found in seconds.items()]


def run_optimizers(*, rounds: int, threads: int, dims: list[int], out: Path, smoke: bool) -> None:
    """Measure, print, and write the figures."""
    rows_count, ids_count = (SMOKE_ROWS_COUNT, SMOKE_IDS_PER_STEP) if smoke else (ROWS_COUNT, IDS_PER_STEP)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        figures = [
            figure
            for dim in dims
            for rule in SPARSE
            for figure in measure(rule, dim=dim, rows_count=rows_count, ids_count=ids_count, rounds=rounds)
        ]
    finally:
        torch.set_num_threads(before)
    console = make_console()
    title = f"{ids_count} of {rows_count} rows a step, float32, {threads} threads: million rows a second"
    rates = {(figure.dim, figure.rule, figure.contestant): figure.mrows_per_s for figure in figures}
    print_table(console, title, ["rule", "dim", OURS, KNOWN, TORCH, "of it", FBGEMM, "of it", "known"], _rows(rates))
    targets = _targets(rates)
    print_targets(console, targets)
    content = {"machine": machine(), "threads": threads, "figures": [vars(figure) for figure in figures]}
    write_json(out.with_suffix(".json"), content)
    out.with_suffix(".txt").write_text(console.export_text())


def _rate(rates: dict[tuple[int, str, str], float], dim: int, rule: str, name: str) -> float:
    return rates.get((dim, rule, name), float("nan"))


def _rows(rates: dict[tuple[int, str, str], float]) -> list[list[str]]:
    rows = []
    for dim, rule in dict.fromkeys((dim, rule) for dim, rule, _ in rates):
        ours, known, torchs, fbgemms = (_rate(rates, dim, rule, name) for name in (OURS, KNOWN, TORCH, FBGEMM))
        of_torch, of_fbgemm, known_of_it = times(ours / torchs), times(ours / fbgemms), times(known / fbgemms)
        shown = [number(ours, 2), number(known, 2), number(torchs, 2), of_torch, number(fbgemms, 2), of_fbgemm]
        rows.append([rule, str(dim), *shown, known_of_it])
    return rows


def _targets(rates: dict[tuple[int, str, str], float]) -> list[Target]:
    """The slowest of all rules beside each of the others."""

    def least(ours: str, name: str) -> float:
        ratios = [
            rate / rates[dim, rule, name]
            for (dim, rule, who), rate in rates.items()
            if who == ours and (dim, rule, name) in rates
        ]
        return min(ratios, default=float("nan"))

    return [
        Target("rows a second / torch's sparse optimizer, the least", least(OURS, TORCH), TIMES_TORCH, at_least=True),
        Target("the same by known rows / FBGEMM's operator", least(KNOWN, FBGEMM), TIMES_FBGEMM, at_least=True),
        Target("by ids, found and marked / FBGEMM's operator", least(OURS, FBGEMM), TIMES_FBGEMM, at_least=True),
    ]
