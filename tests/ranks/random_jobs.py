"""Random jobs of several ranks and a table: drawn from a seed, run by a process per rank, judged by what is there.

A job has lives. In each one, so many ranks say of the table what they hold of it, rightly or wrongly; load what the
life before has left, whatever that one said; train rows of their own, in an order of their own; and save. In some lives
a rank kills itself in a save. Before a save each rank notes what it holds, and after it that it was told of success.

1. What is said wrongly is refused, on every rank, before anything is there.
2. A checkpoint that one rank was told of is there after the life, and every checkpoint that is there holds what all of
   its ranks noted for it, bit by bit.
3. Ranks of the next life find the rows of the newest one that are theirs, and no others.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt.coordination import file_channel, store_channel
from asyncckpt.coordination.messages import Limits
from asyncckpt.errors import CheckpointError, ConflictError, PeerError, UsageError
from asyncckpt.model.owned_ids import owned_mask
from asyncckpt.model.table_shard import Shard
from tests.ranks.forked import await_end, end, start
from tests.ranks.kill_points import OF_COORDINATOR, OF_PARTICIPANT, strike_at
from tests.ranks.table_ranks import MAKERS, values_of

LIVES_COUNT = 2
RUN_S_MAX = 120.0
OUTCOME_S_MAX = 60.0
OPENING_S_MAX = 60.0
# Of a rank that died the others hear late; a busy machine makes an error of what would have been a success, no more.
LIMITS = Limits(begin_s=6.0, silence_s=6.0)
WRONG = {
    "shards": ("unsaid", "of another rank", "twice", "beside a replica"),
    "slices": ("unsaid", "overlap", "beside a replica"),
    "replicas": ("unsaid", "rows of their own", "another value"),
}
REFUSED_AT_ONCE = ("unsaid", "of another rank")

Rows = dict[int, int]  # id -> version


@dataclass(frozen=True)
class Life:
    """What one start of a job does.

    first   its first step
    shards  of each rank; none: replicas
    dies    rank, step, point
    """

    number: int
    kind: str
    said: str
    wrong: str | None
    shards: tuple[Shard, ...]
    ranks_count: int
    first: int
    saves_count: int
    dies: tuple[int, int, str] | None
    over: str

    def says(self, rank: int) -> dict[str, Any]:
        return {"shard": self.shards[rank]} if self.shards else {"replicated": True}

    def owned(self, ids: np.ndarray[Any, Any], rank: int) -> np.ndarray[Any, Any]:
        return owned_mask(ids, shard=self.shards[rank]) if self.shards else np.ones(len(ids), dtype=bool)


def draw_life(draw: random.Random, *, number: int, kind: str, first: int) -> Life:
    count = draw.choice([2, 3, 4])
    said = draw.choice(list(WRONG))
    saves_count = draw.randint(1, 3)
    shards: tuple[Shard, ...] = ()
    if said == "shards":
        shards = tuple((rank, count) for rank in range(count))
    elif said == "slices":
        size = draw.choice([65_536, 65_536, 1000, count + 1])
        cuts = [0, *sorted(draw.sample(range(1, size), count - 1)), size]
        shards = tuple((cuts[rank], cuts[rank + 1], size) for rank in range(count))
    dies = None
    if draw.random() < 0.4:
        victim = draw.randrange(count)
        point = draw.choice(OF_PARTICIPANT if victim else OF_COORDINATOR)
        dies = victim, first + draw.randrange(saves_count), point
    return Life(
        number=number,
        kind=kind,
        said=said,
        wrong=draw.choice(WRONG[said]) if draw.random() < 0.4 else None,
        shards=shards,
        ranks_count=count,
        first=first,
        saves_count=saves_count,
        dies=dies,
        over=draw.choice(["file", "store"]),
    )


# -- a rank ------------------------------------------------------------------------------------------------------------


def live(seed: int, life: Life, plant: str | None, rank: int, folder: Path) -> None:
    """Run one rank. plant: a fault that the judges have to find."""
    torch.set_num_threads(1)
    store_channel.CLOSE_S_MAX = file_channel.CLOSE_S_MAX = 0.3  # A rank that was killed is waited for in vain.
    if life.over == "store":
        store = f"file://{folder}/store-{life.number}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=life.ranks_count)
    if life.wrong is not None:
        say_wrongly(life, rank, folder)
    table = MAKERS[life.kind](**life.says(rank))
    rows = load(life, table, rank, folder)
    # Replicas are trained alike; ranks with rows of their own as they like. The order is always their own.
    training = random.Random(f"{seed} {life.number} {rank if life.shards else 'all'}")
    order = random.Random(f"order {seed} {life.number} {rank}")
    try:
        with saver_of(life, rank, folder / "checkpoints", table) as saver:
            for step in range(life.first, life.first + life.saves_count):
                train(table, rows, life, rank, training, order, version=step)
                save(saver, table, rows, life, rank, step, folder, training, plant)
    except PeerError as error:
        print(f"rank {rank} ends: {error}")
    except UsageError as error:
        # It has found the last save for itself, because rank 0 died behind the commit.
        if "kind='delta' needs a base" not in str(error):
            raise
    (folder / f"ended-{life.number}-{rank}").touch()
    os._exit(0)  # Without a word to the store, whose server may be gone.


def saver_of(life: Life, rank: int, path: Path, table: Any) -> asyncckpt.Saver:
    saver = asyncckpt.Saver(
        rank,
        life.ranks_count,
        path=path,
        hashtables={"t": table},
        ranks=asyncckpt.RankOptions(peer_deadline=OPENING_S_MAX),
        on_busy="wait",
    )
    assert saver._ranks is not None
    saver._ranks.limits = LIMITS
    return saver


def load(life: Life, table: Any, rank: int, folder: Path) -> Rows:
    """Load what is there into this rank's table, and check it."""
    path = folder / "checkpoints"
    if life.number == 0:
        return {}
    step = asyncckpt.list_steps(path)[-1]
    everything = noted(folder, step)
    ids = np.array(sorted(everything), dtype=np.int64)
    mine = {int(id): everything[int(id)] for id in ids[life.owned(ids, rank)]}
    report = asyncckpt.Loader(path, {"t": table}).load()
    assert (report.step, report.rows["t"]) == (step, len(mine)), f"{report}, expected {len(mine)} rows of step {step}"
    assert differences(table, life.kind, mine) == []
    return mine


def train(
    table: Any, rows: Rows, life: Life, rank: int, draw: random.Random, order: random.Random, *, version: int
) -> None:
    """Set some rows, new ones among them, and remove some."""
    drawn = [draw.choice([draw.randrange(-100, 300), draw.randrange(-(2**63), 2**63)]) for _ in range(80)]
    ids = np.array(sorted({*drawn, -(2**63), 2**63 - 1}), dtype=np.int64)
    ids = ids[life.owned(ids, rank)]
    removed = np.array(sorted(draw.sample(sorted(rows), len(rows) // 5)), dtype=np.int64)
    insert(table, ids, version, order)
    rows.update(dict.fromkeys(ids.tolist(), version))
    getattr(table, "table", table).remove(torch.from_numpy(removed))
    for id in removed.tolist():
        rows.pop(id)


def insert(table: Any, ids: np.ndarray[Any, Any], version: int, order: random.Random) -> None:
    ids = np.array(order.sample(ids.tolist(), len(ids)), dtype=np.int64)
    values, sums = values_of(ids, version)
    getattr(table, "table", table).insert(torch.from_numpy(ids), values, sum=sums.contiguous())


def save(
    saver: asyncckpt.Saver,
    table: Any,
    rows: Rows,
    life: Life,
    rank: int,
    step: int,
    folder: Path,
    draw: random.Random,
    plant: str | None,
) -> None:
    """Save, note what is saved and what this rank is told; the rows are other ones while it is written."""
    if life.dies is not None and life.dies[:2] == (rank, step):
        strike_at(life.dies[2], signal.SIGKILL, step=step)
    note(folder, life, rank, step, rows)
    if plant == "a row is lost" and rank == 0 and rows:
        getattr(table, "table", table).remove(torch.tensor([min(rows)]))
    of_all = random.Random(f"{life} {step}")
    kind = "full" if step == life.first else of_all.choice(["full", "delta", "auto"])
    try:
        if of_all.random() < 0.3:
            saver.save(step)
        else:
            future = saver.save_async(step, kind=kind)
            if rows:
                train(table, rows, life, rank, draw, draw, version=-step)
            error = future.exception(OUTCOME_S_MAX)
            if error is not None:
                raise error
    except PeerError:
        if plant != "told of what has failed":
            raise
    (folder / f"told-{life.number}-{rank}-{step}").touch()


def say_wrongly(life: Life, rank: int, folder: Path) -> None:
    """Say of another table what is not so: refused."""
    path, count = folder / f"wrong {life.number}", life.ranks_count
    says: dict[str, Any] = {
        "unsaid": {},
        "of another rank": {"shard": ((rank + 1) % count, count)},
        "twice": {"shard": (0, 2 * count) if rank < 2 else (rank, 2 * count)},
        "overlap": {"shard": _overlapping(life, rank)},
        "beside a replica": {"replicated": True} if rank == count - 1 else life.says(rank),
    }.get(life.wrong or "", {"replicated": True})
    table = MAKERS[life.kind](**says)
    if life.wrong in REFUSED_AT_ONCE:
        with pytest.raises(UsageError, match="'t'"):
            saver_of(life, rank, path, table)
        assert not path.exists()
        return
    ids = np.arange(5) if life.wrong != "rows of their own" else np.arange(rank, rank + 5)
    if life.said == "replicas":
        insert(table, ids, int(life.wrong == "another value" and rank == 1), random.Random(rank))
    with saver_of(life, rank, path, table) as saver:
        error = saver.save_async(1).exception(OUTCOME_S_MAX)
    # Where another rank was late, nobody knows yet that they contradict each other.
    assert isinstance(error, (ConflictError, PeerError)), error
    assert asyncckpt.list_steps(path) == []
    (folder / f"refused-{life.number}-{rank}-{type(error).__name__}").touch()


def _overlapping(life: Life, rank: int) -> Shard:
    if life.said != "slices":
        return (0, 1)
    begin, end, size = life.shards[rank]  # type: ignore[misc]
    return (begin - 1, end, size) if rank == 1 else (begin, end, size)


# -- what is noted, and judged -----------------------------------------------------------------------------------------


def note(folder: Path, life: Life, rank: int, step: int, rows: Mapping[int, int]) -> None:
    numbers = np.array([*rows.items()], dtype=np.int64).reshape(-1, 2)
    np.save(folder / f"noted-{step}-{life.number}-{rank}.npy", numbers)


def noted(folder: Path, step: int) -> Rows:
    """What all ranks of the last life that came to a step held then."""
    files = [(int(path.stem.split("-")[2]), path) for path in folder.glob(f"noted-{step}-*.npy")]
    last = max(number for number, _ in files)
    rows: Rows = {}
    for number, path in files:
        if number == last:
            rows.update(np.load(path).tolist())
    return rows


def differences(table: Any, kind: str, rows: Mapping[int, int]) -> list[str]:
    """What a table has that these rows are not, bit by bit."""
    own = getattr(table, "table", table)
    if len(own) != len(rows):
        return [f"{len(own)} rows, expected {len(rows)}"]
    ids = torch.tensor(sorted(rows), dtype=torch.int64)
    versions = torch.tensor([rows[int(id)] for id in ids], dtype=torch.float64)
    wanted = dict(zip(("embedding", "sum"), values_of(ids.numpy(), versions), strict=True))  # type: ignore[arg-type]
    if kind == "levels":
        read = own.read(ids)
    else:
        at = own.lookup(ids, insert=False)
        if bool((at < 0).any()):
            return [f"ids {ids[at < 0][:5].tolist()} are missing"]
        read = {"embedding": own.embedding[at], "sum": own.slot("sum")[at]}
    return [f"other values in {name}" for name, value in wanted.items() if not torch.equal(read[name], value)]


def run_job(seed: int, folder: Path, *, plant: str | None = None) -> tuple[Counter[str], list[str]]:
    """Run a job; return what has happened in it, and what is wrong, with what its ranks printed.

    Its folder is removed when nothing is wrong.
    """
    draw, seen = random.Random(seed), Counter[str]()
    kind = draw.choice(list(MAKERS))
    complaints: list[str] = []
    folder.mkdir()
    number, first = 0, 1
    while number < LIVES_COUNT and not complaints:
        life = draw_life(draw, number=number, kind=kind, first=first)
        complaints = run_life(seed, life, plant, folder, seen)
        steps = asyncckpt.list_steps(folder / "checkpoints") if (folder / "checkpoints").exists() else []
        if not steps:
            break  # The first save has failed.
        number, first = number + 1, steps[-1] + 1
        if complaints:
            complaints = [f"seed {seed}, {life}", *complaints]
    outputs = [f"{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in sorted(folder.glob("output-*"))]
    if complaints:
        return seen, [*complaints, *outputs]
    shutil.rmtree(folder)
    return seen, []


def run_life(seed: int, life: Life, plant: str | None, folder: Path, seen: Counter[str]) -> list[str]:
    ranks = [
        start(live, (seed, life, plant, rank, folder), folder / f"output-{life.number}-{rank}")
        for rank in range(life.ranks_count)
    ]
    try:
        await_end(ranks, RUN_S_MAX)
    finally:
        for process in ranks:
            end(process)
    # Not by exit codes: where threads start processes, multiprocessing may lose them.
    missing = [rank for rank in range(life.ranks_count) if not (folder / f"ended-{life.number}-{rank}").exists()]
    has_died = life.dies is not None and life.dies[0] in missing
    complaints = [f"rank {rank} did not come to its end" for rank in missing if not has_died or rank != life.dies[0]]
    seen["lives"] += 1
    seen["deaths"] += has_died
    refused = life.wrong in REFUSED_AT_ONCE or any(folder.glob(f"refused-{life.number}-*-ConflictError"))
    seen["refused"] += life.wrong is not None and refused
    return complaints + judge(life, folder, seen)


def judge(life: Life, folder: Path, seen: Counter[str]) -> list[str]:
    """Judge the directory after a life."""
    path = folder / "checkpoints"
    told = {int(file.name.split("-")[3]) for file in folder.glob("told-*")}
    try:
        steps = asyncckpt.list_steps(path) if path.exists() else []
        complaints = [f"step {step} was acknowledged and is lost" for step in sorted(told - set(steps))]
        for step in steps:
            table = MAKERS[life.kind]()
            asyncckpt.Loader(path, {"t": table}, step=step, on_busy="wait").load()  # Other jobs load, too.
            complaints += [f"step {step}: {what}" for what in differences(table, life.kind, noted(folder, step))]
    except CheckpointError as error:
        return [f"cannot be loaded: {error!r}"]
    committed = sum(step >= life.first for step in steps)
    seen["committed"] += committed
    seen["deltas"] += sum(asyncckpt.describe(path, step).kind == "delta" for step in steps)
    seen["not committed"] += life.saves_count - committed
    return complaints
