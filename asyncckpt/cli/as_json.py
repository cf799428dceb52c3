"""Answers as JSON, one object on standard output.

Numbers are plain (bytes, not "1.2 GiB"). Metadata and values that JSON cannot hold (bytes, nan, complex, keys other
than str) are shown as their Python repr; `asyncckpt.describe` returns them exactly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncckpt.checkpoints import CheckpointInfo, CheckpointSummary, VerifyReport
from asyncckpt.cli.findings import Finding
from asyncckpt.errors import CheckpointError
from asyncckpt.model.result import SaveResult

if TYPE_CHECKING:
    from asyncckpt.follower import Update


def print_list(path: Path, findings: Sequence[Finding[CheckpointSummary]]) -> None:
    """`{"path": ..., "checkpoints": [{"step": ..., "error": null, ...}]}`"""
    checkpoints = [_with_error(finding, {} if finding.fact is None else _summary(finding.fact)) for finding in findings]
    print_answer({"path": str(path), "checkpoints": checkpoints})


def print_info(path: Path, info: CheckpointInfo) -> None:
    """Print everything that `show` knows, with all blocks."""
    facts = {"values": info.values, "ranks": [asdict(rank) for rank in info.ranks]}
    print_answer({"path": str(path), **_summary(info), **facts, "blocks": [asdict(block) for block in info.blocks]})


def print_verified(path: Path, findings: Sequence[Finding[VerifyReport]]) -> None:
    """`{"path": ..., "sound": true, "checkpoints": [{"step": ..., "sound": true, ...}]}`"""
    checkpoints = []
    for finding in findings:
        facts: dict[str, Any] = {"sound": finding.is_sound}
        if finding.fact is not None:
            report = finding.fact
            facts |= {"steps": list(report.steps), "blocks": report.blocks_count, "bytes_read": report.bytes_read}
            facts["strays"] = list(report.strays)
        checkpoints.append(_with_error(finding, facts))
    print_answer({"path": str(path), "sound": all(f.is_sound for f in findings), "checkpoints": checkpoints})


def print_compacted(result: SaveResult) -> None:
    """`{"path": ..., "step": ..., "compacted": true, ...}`; compacted is false if there was nothing to do."""
    facts = {"step": result.step, "compacted": not result.skipped, "bytes_written": result.bytes_written}
    print_answer({"path": str(result.path), **facts, "seconds": result.seconds})


def print_update(update: Update) -> None:
    """Print one line and flush it."""
    tables = {name: asdict(table) for name, table in update.tables.items()}
    facts = {"step": update.step, "kind": update.kind, "previous": update.previous, "tables": tables}
    print(json.dumps({**facts, "metadata": _plain(update.metadata)}, allow_nan=False), flush=True)


def print_error(error: CheckpointError) -> None:
    print_answer({"error": _error(error)})


def print_answer(answer: Mapping[str, Any]) -> None:
    print(json.dumps(_plain(answer), indent=2, allow_nan=False))


def _summary(info: CheckpointSummary) -> dict[str, Any]:
    """Return what a list shows."""
    facts = {field.name: getattr(info, field.name) for field in fields(CheckpointSummary)}
    times = None if info.times is None else asdict(info.times)
    return {**facts, "times": times, "table_infos": {name: asdict(table) for name, table in info.table_infos.items()}}


def _with_error(finding: Finding[object], facts: dict[str, Any]) -> dict[str, Any]:
    error = None if finding.error is None else _error(finding.error)
    return {"step": finding.step, **facts, "error": error}


def _error(error: CheckpointError) -> dict[str, str]:
    return {"kind": type(error).__name__, "message": str(error)}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return repr(value)
