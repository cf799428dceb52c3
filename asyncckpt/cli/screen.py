"""Answers for people, as lines of text."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asyncckpt.checkpoints import BlockInfo, CheckpointInfo, CheckpointSummary, VerifyReport
from asyncckpt.cli.findings import Finding
from asyncckpt.cli.text import count_of, print_columns, print_facts, safe, shown_value, size
from asyncckpt.errors import CheckpointError
from asyncckpt.model.result import SaveResult

if TYPE_CHECKING:
    from asyncckpt.follower import TableUpdate, Update

CHAIN_STEPS_SHOWN_MAX = 16
RANKS_SHOWN_MAX = 64
_NUMBERS = frozenset({"step", "base", "size", "files", "table rows", "rows", "removed", "tensors", "blocks", "read"})


def print_list(
    path: Path, findings: Sequence[Finding[CheckpointSummary]], *, has_metadata: bool, count_max: int
) -> None:
    """Print a line for each of the newest checkpoints; damaged ones are marked, with the reason below."""
    if not findings:
        print(f"no such checkpoints in {safe(str(path))}")
        return
    every, findings = findings, findings[max(0, len(findings) - count_max) :]
    if len(every) > len(findings):
        print(f"and {len(every) - len(findings):,} older ones (--most, --json)")
    # Leave out columns that only deltas fill.
    has_deltas = any(finding.fact is not None and finding.fact.parents for finding in findings)
    heads = [
        "step",
        "created",
        "kind",
        "base",
        "size",
        "files",
        "table rows",
        "removed",
        "tensors",
        "state",
        "metadata",
    ]
    left_out = (*(() if has_deltas else ("base", "removed")), *(() if has_metadata else ("metadata",)))
    heads = [head for head in heads if head not in left_out]
    rows = []
    for finding in findings:
        cells = {"step": str(finding.step), "state": _state(finding)}
        if (info := finding.fact) is not None:
            cells |= {
                "created": info.created,
                "kind": _kind(info),
                "base": str(info.parents[0]) if info.parents else "",
                "size": size(info.bytes),
                "files": str(len(info.files)),
                "table rows": f"{sum(info.tables.values()):,}",
                "removed": f"{sum(item.removed for item in info.table_infos.values()):,}",
                "tensors": f"{info.tensors_count:,}",
                "metadata": ", ".join(f"{safe(str(key))}={shown_value(item)}" for key, item in info.metadata.items()),
            }
        rows.append([cells.get(head, "") for head in heads])
    print_columns(heads, rows, right=_NUMBERS)
    _print_errors(every)


def print_info(path: Path, info: CheckpointInfo, *, count_max: int) -> None:
    """Print one checkpoint: head, tables, plain values, blocks, files."""
    facts = [("checkpoint", f"step {info.step} of {path}"), ("kind", _kind(info))]
    facts += [("base", _chain(info.parents))] if info.parents else []
    facts += [("created", f"{info.created} by {info.writer}")]
    facts += [("size", f"{size(info.bytes)} in {count_of(len(info.files), 'file')}")]
    facts += [("saved by", count_of(info.ranks_count, "rank"))] if info.ranks_count > 1 else []
    facts += [("digest", info.digest)]
    facts += [("pinned", "retention keeps it")] if info.pinned else []
    facts += [("metadata", shown_value(dict(info.metadata)))] if info.metadata else []
    print_facts(facts)
    if info.tables:
        _print_tables(info)
    if info.ranks_count > 1:
        _print_ranks(info)
    if info.values:
        _print_values(info.values, count_max)
    _print_blocks(info.blocks, count_max)
    print()
    print_columns(["file"], [[file] for file in info.files])


def print_verified(path: Path, findings: Sequence[Finding[VerifyReport]]) -> None:
    """Print a line per verified checkpoint, then errors and leftovers."""
    rows = []
    strays: list[str] = []
    for finding in findings:
        report = finding.fact
        if report is None:
            rows.append([str(finding.step), _state(finding), "", ""])
            continue
        rows.append([str(finding.step), "sound", f"{report.blocks_count:,}", size(report.bytes_read)])
        strays += [name for name in report.strays if name not in strays]
    print_columns(["step", "state", "blocks", "read"], rows, right=_NUMBERS)
    _print_errors(findings)
    if strays:
        found = count_of(len(strays), "leftover")
        print(f"{found} of saves that did not commit in {safe(str(path))} (the next save removes them):")
        for name in strays:
            print(f"  {safe(name)}")


def print_compacted(result: SaveResult) -> None:
    if result.skipped:
        print(f"step {result.step} is a full checkpoint already: nothing to do")
    else:
        written = f"{size(result.bytes_written)} in {result.seconds:.1f} s"
        print(f"step {result.step} is now a full checkpoint: {written}")


def print_update(update: Update) -> None:
    """Print one line and flush it."""
    base = "" if update.previous is None else f" on {update.previous}"
    tables = [f"{name} {_change(table)}" for name, table in update.tables.items()]
    print(safe("  ".join([f"step {update.step}", f"{update.kind}{base}", *tables])), flush=True)


def print_error(error: CheckpointError) -> None:
    print(f"asyncckpt: {safe(str(error))}", file=sys.stderr)


def complain(command: str, what: str) -> None:
    """Say what is wrong with how a command was called."""
    print(f"asyncckpt {command}: {what}", file=sys.stderr)


def _kind(info: CheckpointSummary) -> str:
    return "compacted" if info.compacted else info.kind


def _chain(parents: Sequence[int]) -> str:
    shown = [str(step) for step in parents]
    if len(shown) > CHAIN_STEPS_SHOWN_MAX:
        more = f"... {len(shown) - CHAIN_STEPS_SHOWN_MAX + 1} more ..."
        shown = [*shown[: CHAIN_STEPS_SHOWN_MAX - 2], more, shown[-1]]
    return " -> ".join(shown) + " (full)"


def _print_tables(info: CheckpointInfo) -> None:
    heads = ["table", "rows", "removed", "holds"] if info.parents else ["table", "rows"]
    rows = []
    for name, item in info.table_infos.items():
        row = [name, f"{item.rows:,}", f"{item.removed:,}", "all rows" if item.whole else "changes"]
        rows.append(row[: len(heads)])
    print()
    print_columns(heads, rows, right=_NUMBERS)


def _print_ranks(info: CheckpointInfo) -> None:
    rows = [
        [str(rank.rank), str(len(rank.files)), size(rank.bytes), f"{sum(rank.tables.values()):,}"]
        for rank in info.ranks[:RANKS_SHOWN_MAX]
    ]
    print()
    print_columns(["rank", "files", "size", "table rows"], rows, right=_NUMBERS | {"rank"})
    _print_more(len(info.ranks) - len(rows), "rank")


def _print_values(values: Mapping[str, object], count_max: int) -> None:
    rows = [[name, shown_value(value)] for name, value in list(values.items())[:count_max]]
    if rows:
        print()
        print_columns(["value", "is"], rows)
    _print_more(len(values) - len(rows), "value")


def _change(table: TableUpdate) -> str:
    rows = count_of(table.rows_count, "row")
    if table.whole:
        return f"all {rows}"
    return f"{rows}, {table.removed_count:,} removed" if table.removed_count else rows


def _print_blocks(blocks: Sequence[BlockInfo], count_max: int) -> None:
    rows = [
        [b.name, b.role, b.dtype, str(list(b.shape)), size(b.bytes), b.file, str(b.offset)] for b in blocks[:count_max]
    ]
    if rows:
        print()
        print_columns(["block", "role", "dtype", "shape", "size", "file", "offset"], rows, right=_NUMBERS | {"offset"})
    _print_more(len(blocks) - len(rows), "block")


def _print_more(count: int, noun: str) -> None:
    if count > 0:
        print(f"and {count_of(count, f'more {noun}')} (--most, --json)")


def _print_errors(findings: Sequence[Finding[object]]) -> None:
    for finding in findings:
        if finding.error is not None:
            print(f"step {finding.step}: {safe(str(finding.error))}")


def _state(finding: Finding[object]) -> str:
    if finding.error is None:
        return "pinned" if isinstance(finding.fact, CheckpointSummary) and finding.fact.pinned else "committed"
    return type(finding.error).__name__.removesuffix("Error").lower()
