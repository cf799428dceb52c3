"""Answers as JSON, one object on standard output.

Numbers are plain (bytes, not "1.2 GiB"). Metadata that JSON cannot hold (bytes, nan, complex, keys other than str) is
shown as its Python repr; `asyncckpt.describe` returns it exactly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from asyncckpt.checkpoints import CheckpointInfo
from asyncckpt.cli.findings import Finding
from asyncckpt.engine.load.verify import VerifyReport
from asyncckpt.errors import CheckpointError
from asyncckpt.follower import Update
from asyncckpt.model.result import SaveResult


def print_list(path: Path, findings: Sequence[Finding[CheckpointInfo]]) -> None:
    """`{"path": ..., "checkpoints": [{"step": ..., "error": null, ...}]}`"""
    checkpoints = [_with_error(finding, {} if finding.fact is None else _summary(finding.fact)) for finding in findings]
    _print({"path": str(path), "checkpoints": checkpoints})


def print_info(path: Path, info: CheckpointInfo) -> None:
    """Print everything that `show` knows, with all blocks."""
    blocks = [asdict(block) for block in info.blocks]
    _print({"path": str(path), **_summary(info), "metadata": _plain(info.metadata), "blocks": blocks})


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
    _print({"path": str(path), "sound": all(f.is_sound for f in findings), "checkpoints": checkpoints})


def print_compacted(result: SaveResult) -> None:
    """`{"path": ..., "step": ..., "compacted": true, ...}`; compacted is false if there was nothing to do."""
    facts = {"step": result.step, "compacted": not result.skipped, "bytes_written": result.bytes_written}
    _print({"path": str(result.path), **facts, "seconds": result.seconds})


def print_update(update: Update) -> None:
    """Print one line and flush it."""
    tables = {name: asdict(table) for name, table in update.tables.items()}
    facts = {"step": update.step, "kind": update.kind, "previous": update.previous, "tables": tables}
    print(json.dumps({**facts, "metadata": _plain(update.metadata)}, allow_nan=False), flush=True)


def print_error(error: CheckpointError) -> None:
    _print({"error": _error(error)})


def _summary(info: CheckpointInfo) -> dict[str, Any]:
    """Return everything but metadata and blocks."""
    facts: dict[str, Any] = _plain(asdict(replace(info, blocks=(), metadata={})))
    del facts["blocks"], facts["metadata"]
    return {**facts, "ranks_count": info.ranks_count, "blocks_count": len(info.blocks)}


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


def _print(answer: Mapping[str, Any]) -> None:
    print(json.dumps(answer, indent=2, allow_nan=False))
