"""Checkpoints that build upon each other: a full one, and deltas over updates, removals, rebirths and growth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import asyncckpt
from tests.end_to_end.state import DIM, State

ALWAYS_DELTAS = asyncckpt.DeltaPolicy(deltas_max=1000, bytes_share_max=1e9)


class TrainingRun:
    """A state that is trained a little and saved, over and over; `images` holds what was saved at each step."""

    def __init__(self, path: Path, *, seed: int = 0, rows: int = 300, **options: Any) -> None:
        self.path = path
        self.state = State.filled(seed, rows=rows)
        self.images: dict[int, dict[str, Any]] = {}
        self._generator = torch.Generator().manual_seed(seed + 1)
        self._removed = torch.empty(0, dtype=torch.int64)
        settings = {"deltas": ALWAYS_DELTAS, "durability": "none"} | options
        self.saver = asyncckpt.Saver(path=path, hashtables=self.state.tables, tensors=self.state.dense, **settings)

    def train(self) -> None:
        """Change some rows of every table, remove some ids, bring some back, let some new ones come."""
        for table in self.state.tables.values():
            known = table.ids()[torch.randperm(len(table), generator=self._generator)]
            new = torch.randint(-(2**63), 2**63 - 1, (7,), generator=self._generator)
            gone, changed = known[:9], known[9:40]
            table.remove(gone)
            back = torch.cat([gone[:3], self._removed[:2]])
            written = torch.cat([changed, new, back]).unique()
            table.lookup(written)
            with table.rows(written) as rows:
                rows.embedding = torch.rand(len(written), DIM, generator=self._generator)
                rows["sum"] = torch.rand(len(written), generator=self._generator)
            self._removed = gone
        with torch.no_grad():
            self.state.dense["w"].add_(1)

    def save(self, step: int, kind: str = "auto") -> asyncckpt.SaveResult:
        """Train, and save this step."""
        self.train()
        result = self.saver.save_async(step, kind=kind, metadata={"step": step}).result(60)
        self.images[step] = self.state.image()
        return result

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, *error: object) -> None:
        self.saver.close()
