"""What one training process shall do; it travels as JSON on the command line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

SaverName = Literal["asyncckpt", "torch.save"]


@dataclass(frozen=True)
class RunSpec:
    """One training run over `log_path` that saves to `directory`, and resumes from there if there is a checkpoint.

    cold_rows_count  rows of both item tables that no batch reads
    device           of the MLP, and of the cache level of the tables
    cache_rows       rows of each cache level; 0: the tables have none, and are on the host
    threads          of torch; the order of its sums depends on them, so all runs that are compared have the same number
    """

    saver: SaverName
    directory: str
    log_path: str
    steps: int
    every_steps: int
    cold_rows_count: int
    device: str = "cpu"
    cache_rows: int = 0
    dim: int = 64
    batch_size: int = 1024
    window: int = 3
    negatives_count: int = 256
    keep: int = 2
    threads: int = 1
    seed: int = 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> RunSpec:
        fields: dict[str, Any] = json.loads(text)
        return RunSpec(**fields)
