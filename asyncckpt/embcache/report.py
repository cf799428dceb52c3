"""What a load of sparse tables reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Layout = Literal["asyncckpt", "recsdk ranks", "recsdk merged"]


@dataclass(frozen=True)
class SparseLoadReport:
    """What `asyncckpt.embcache.Saver.load` did.

    path         the folder that was read; of RecSDK's timestamp folders, the newest
    layout       who wrote it: "asyncckpt", or RecSDK with one folder per rank, or with its ranks merged
    step         the step that was loaded; None where RecSDK wrote it
    world_size   how many ranks wrote it; None where RecSDK has merged them
    save_id      the random id that all ranks of the save share; None where RecSDK wrote it
    rows         rows that this rank's tables took, per table
    passed_over  newer steps that not all ranks have
    ignored      parts of the checkpoint that the module has no place for, for example counts of candidates
    """

    path: Path
    layout: Layout
    step: int | None = None
    world_size: int | None = None
    save_id: str | None = None
    rows: Mapping[str, int] = field(default_factory=dict)
    passed_over: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()
    bytes_read: int = 0
    seconds: float = 0.0
