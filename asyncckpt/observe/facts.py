"""What the page shows of a checkpoint directory: its manifests in brief, as JSON. 5,000 steps take a megabyte."""

from __future__ import annotations

import calendar
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from asyncckpt.checkpoints import CheckpointSummary
from asyncckpt.errors import CheckpointError
from asyncckpt.format.head import CREATED_FORMAT
from asyncckpt.model.store_url import Place

TABLES_MAX = 40  # Those with the most rows have names on the page; of all others only the sum of rows is there.
FIELDS = (
    *(
        "step",
        "kind",
        "upon",
        "depth",
        "created",
        "bytes",
        "files",
        "ranks",
        "rows",
        "removed",
        "tensors",
        "blocks",
        "pinned",
    ),
    *("called", "stall", "begun", "written", "writer", "digest", "tables", "error"),
)


def report_of(path: Place, found: Mapping[int, CheckpointSummary | CheckpointError]) -> dict[str, Any]:
    """Return what the page shows. Times of saves are in microseconds, others UNIX time in seconds."""
    sound = [answer for answer in found.values() if isinstance(answer, CheckpointSummary)]
    most: Counter[str] = Counter()
    for summary in sound:
        for name, rows in summary.tables.items():
            most[name] = max(most[name], rows)
    names = sorted(name for name, _ in most.most_common(TABLES_MAX))
    numbers = {name: number for number, name in enumerate(names)}
    return {
        "path": str(path),
        "name": path.name or str(path),
        "made": time.time(),
        "tables": names,
        "more_tables": len(most) - len(names),
        "fields": FIELDS,
        "rows": [_row(step, answer, numbers) for step, answer in found.items()],
        "problem": None,
    }


def _row(step: int, answer: CheckpointSummary | CheckpointError, numbers: Mapping[str, int]) -> list[Any]:
    if isinstance(answer, CheckpointError):
        known: dict[str, Any] = {"step": step, "kind": "damaged", "error": str(answer), "tables": []}
        return [known.get(name) for name in FIELDS]
    times = answer.times
    tables = answer.table_infos.items()
    facts = {
        "step": step,
        "kind": "compacted" if answer.compacted else answer.kind,
        "upon": answer.parents[0] if answer.parents else None,
        "depth": len(answer.parents),
        "created": _unix_time(answer.created),
        "bytes": answer.bytes,
        "files": len(answer.files),
        "ranks": answer.ranks_count,
        "rows": sum(answer.tables.values()),
        "removed": sum(info.removed for _, info in tables),
        "tensors": answer.tensors_count,
        "blocks": answer.blocks_count,
        "pinned": answer.pinned,
        "writer": answer.writer,
        "digest": answer.digest,
        "tables": [[numbers[name], info.rows, info.removed, info.whole] for name, info in tables if name in numbers],
    }
    if times is not None:
        facts |= {"called": times.called_us, "stall": times.stall_us}
        facts |= {"begun": times.begun_us, "written": times.written_us}
    return [facts.get(name) for name in FIELDS]


def _unix_time(created: str) -> int | None:
    try:
        return calendar.timegm(time.strptime(created, CREATED_FORMAT))
    except (ValueError, OverflowError):  # Another writer's form.
        return None
