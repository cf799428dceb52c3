"""Zipf training with a save every so many steps: what a chain of deltas writes beside full saves.

One full save, then deltas. What the default policy would have written follows from the same figures: how large a delta
is does not depend on the chain below it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.marking import ZipfTrainer
from bench.state import ROW_BYTES, TABLES_COUNT, dense_tensors

DENSE_BYTES = 8 << 20
DENSE_COUNT = 16


@dataclass(frozen=True)
class ZipfSpec:
    directory: str
    figures_path: str
    state_bytes: int
    saves_count: int
    steps_per_save: int


def run_one(spec: ZipfSpec) -> dict[str, Any]:
    from asyncckpt import DeltaPolicy, Saver

    trainer = ZipfTrainer((spec.state_bytes - DENSE_BYTES) // TABLES_COUNT // ROW_BYTES)
    tables = {table.name: table.hashtable for table in trainer.tables}
    results = []
    with Saver(
        path=spec.directory,
        hashtables=tables,
        tensors=dense_tensors(DENSE_COUNT, DENSE_BYTES // DENSE_COUNT),
        deltas=DeltaPolicy(deltas_max=spec.saves_count, bytes_share_max=1e9),
    ) as saver:
        for _ in range(spec.saves_count):
            for _ in range(spec.steps_per_save):
                trainer.step_anew()
            results.append(saver.save_async().result())
    written = [result.bytes_written for result in results]
    return {
        "steps_per_save": spec.steps_per_save,
        "bytes": written,
        "full_bytes": written[0],
        "stall_seconds": [result.stall_seconds for result in results],
        "durable_seconds": [result.seconds for result in results],
        "default_policy_bytes": bytes_of(DeltaPolicy(), written),
    }


def bytes_of(policy: Any, written: Sequence[int]) -> int:
    """What a policy would have written; `written` are a full save and the deltas after it."""
    full, total, chain = written[0], written[0], []
    for delta in written[1:]:
        is_due = len(chain) >= policy.deltas_max or sum(chain) + delta > policy.bytes_share_max * full
        total += full if is_due else delta
        chain = [] if is_due else [*chain, delta]
    return total


if __name__ == "__main__":
    child_spec = ZipfSpec(**json.loads(sys.argv[1]))
    Path(child_spec.figures_path).write_text(json.dumps(run_one(child_spec)))
