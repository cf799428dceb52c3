"""What a directory might hold, made up: thousands of checkpoints of a long run, and names that want to be markup."""

from __future__ import annotations

import random
import time
from dataclasses import replace

from asyncckpt.checkpoints import CheckpointSummary, SaveTimes, TableInfo
from asyncckpt.errors import CheckpointError, CorruptError
from asyncckpt.format.head import CREATED_FORMAT

BEGUN = 1_795_000_000
HOSTILE = (
    "</script><img src=x onerror=\"document.title='hostile'\">",
    "<svg/onload=alert(1)>",
    "'-alert(1)-'",
    "]]><!--",
    "&lt;b&gt;",
    "\u202egnp.exe\u0000\u2028",
)


def extremes() -> dict[int, CheckpointSummary | CheckpointError]:
    """Numbers that a manifest may hold, and no save writes."""
    most, base = 2**63 - 1, long_run(20)[2500]
    assert isinstance(base, CheckpointSummary)
    times = [SaveTimes(0, 0, 0, 0), SaveTimes(most, most, most, most), base.times, SaveTimes(1, None, most, 0)]
    facts = {"parents": (7,), "kind": "delta", "bytes": most, "tables": {"t": most}, "created": "9999-12-31T23:59:59Z"}
    last = {10**12 - 1: replace(base, step=10**12 - 1, **facts)}
    return {**{step: replace(base, step=step, times=its) for step, its in enumerate(times)}, **last}


def long_run(
    steps_count: int, *, names: tuple[str, ...] = ("user", "item", "context")
) -> dict[int, CheckpointSummary | CheckpointError]:
    """A full checkpoint and 19 deltas behind it, again and again; some are compacted, pinned, blocking or damaged."""
    rng = random.Random(steps_count)
    found: dict[int, CheckpointSummary | CheckpointError] = {}
    at, chain = float(BEGUN), [0]
    for number in range(steps_count):
        step = 500 * (number + 1)
        at += rng.uniform(280, 320) + (7200 if number % 113 == 60 else 0)
        is_full = number % 20 == 0
        is_compacted = number % 20 == 10 and number % 3 == 0
        rows = {name: (4_000_000 if is_full or is_compacted else 90_000) // (k + 1) for k, name in enumerate(names)}
        rows = {name: count + rng.randrange(count // 8) + number * 300 for name, count in rows.items()}
        infos = {
            name: TableInfo(rows=count, whole=is_full or is_compacted, removed=0 if is_full else 12, filters=())
            for name, count in rows.items()
        }
        size = sum(rows.values()) * 132
        parents = () if is_full or is_compacted else tuple(reversed(chain))
        chain = [step] if is_full or is_compacted else [*chain, step]
        stall = int(1e6 * rng.lognormvariate(-5.6, 0.35)) * (9 if number % 97 == 3 else 1)
        written = stall + int(size / 900e6 * 1e6 * rng.uniform(0.9, 1.5)) + 30_000
        times = SaveTimes(int(at * 1e6), None if number % 201 == 200 else stall, stall + 900, written)
        if number % 1500 == 777 or number == steps_count - 7:
            text = f"manifest of step {step} is damaged: its digest is wrong; found {names[0]!r}"
            found[step] = CorruptError(text)
            continue
        found[step] = CheckpointSummary(
            step=step,
            kind="delta" if parents else "full",
            parents=parents,
            compacted=is_compacted,
            created=time.strftime(CREATED_FORMAT, time.gmtime(at + written / 1e6)),
            writer="asyncckpt 0.1.0",
            bytes=size,
            files=tuple(f"data/{step:012d}-{'a' * 32}/r00000-{k:03d}.safetensors" for k in range(2)),
            tables=rows,
            table_infos=infos,
            tensors_count=214,
            blocks_count=214 + 3 * len(names),
            ranks_count=1,
            digest=f"{rng.getrandbits(128):032x}",
            pinned=number % 400 == 100,
            metadata={},
            times=None if number < 3 else times,
        )
    return found
