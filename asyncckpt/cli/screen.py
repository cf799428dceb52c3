"""Answers for people: tables on a terminal, the same text in a pipe.

Names come from files of unknown origin, so nothing in them is interpreted as markup or as a control code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncckpt.checkpoints import BlockInfo, CheckpointInfo
from asyncckpt.cli.findings import Finding
from asyncckpt.engine.follow.table_update import TableUpdate
from asyncckpt.engine.load.verify import VerifyReport
from asyncckpt.errors import CheckpointError
from asyncckpt.follower import Update
from asyncckpt.model.result import SaveResult

PIPE_WIDTH = 200
METADATA_CHARACTERS_MAX = 2000
CHAIN_STEPS_SHOWN_MAX = 16
RANKS_SHOWN_MAX = 64
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def print_list(console: Console, path: Path, findings: Sequence[Finding[CheckpointInfo]]) -> None:
    """Print a line per checkpoint; damaged ones are marked, with the reason below."""
    if not findings:
        console.print(_text(f"no checkpoints in {path}"))
        return
    # Leave out columns that only deltas fill.
    has_deltas = any(finding.fact is not None and finding.fact.parents for finding in findings)
    columns = [("step", "right"), ("created", "left"), ("kind", "left")]
    columns += [("upon", "right")] if has_deltas else []
    columns += [("size", "right"), ("files", "right"), ("table rows", "right")]
    columns += [("removed", "right")] if has_deltas else []
    columns += [("tensors", "right"), ("state", "left")]
    table = _table(*columns)
    for finding in findings:
        info = finding.fact
        if info is None:
            table.add_row(str(finding.step), *["-"] * (len(columns) - 2), Text(_state(finding), style="red"))
            continue
        rows_count = sum(info.tables.values())
        removed_count = sum(item.removed for item in info.table_infos.values())
        dense_count = len({block.name for block in info.blocks if block.role == "dense"})
        cells: list[str | Text] = [str(info.step), _text(info.created), _kind(info)]
        cells += [str(info.parents[0]) if info.parents else "-"] if has_deltas else []
        cells += [size(info.bytes), str(len(info.files)), f"{rows_count:,}"]
        cells += [f"{removed_count:,}"] if has_deltas else []
        table.add_row(*cells, f"{dense_count:,}", "committed")
    console.print(table)
    _print_errors(console, findings)


def print_info(console: Console, path: Path, info: CheckpointInfo, *, blocks_count_max: int) -> None:
    """Print one checkpoint: head, tables, blocks, files."""
    facts = Table.grid(padding=(0, 2))
    facts.add_row("checkpoint", _text(f"step {info.step} of {path}"))
    facts.add_row("kind", _kind(info))
    if info.parents:
        facts.add_row("builds upon", _chain(info.parents))
    facts.add_row("created", _text(f"{info.created} by {info.writer}"))
    facts.add_row("size", f"{size(info.bytes)} in {_count(len(info.files), 'file')}")
    if info.ranks_count > 1:
        facts.add_row("saved by", _count(info.ranks_count, "rank"))
    facts.add_row("digest", info.digest)
    if info.metadata:
        facts.add_row("metadata", _text(repr(dict(info.metadata))[:METADATA_CHARACTERS_MAX]))
    console.print(facts)
    if info.tables:
        console.print(_tables(info))
    if info.ranks_count > 1:
        console.print(_ranks(info))
    _print_blocks(console, info.blocks, blocks_count_max)
    files = _table(("file", "left"))
    for file in info.files:
        files.add_row(file)
    console.print(files)


def print_verified(console: Console, path: Path, findings: Sequence[Finding[VerifyReport]]) -> None:
    """Print a line per verified checkpoint, then errors and leftovers."""
    table = _table(("step", "right"), ("state", "left"), ("blocks", "right"), ("read", "right"))
    strays: list[str] = []
    for finding in findings:
        report = finding.fact
        if report is None:
            table.add_row(str(finding.step), Text(_state(finding), style="red"), "-", "-")
            continue
        table.add_row(
            str(finding.step), Text("sound", style="green"), f"{report.blocks_count:,}", size(report.bytes_read)
        )
        strays += [name for name in report.strays if name not in strays]
    console.print(table)
    _print_errors(console, findings)
    if strays:
        found = _count(len(strays), "leftover")
        console.print(_text(f"{found} of saves that did not commit in {path} (the next save removes them):"))
        for name in strays:
            console.print(_text(f"  {name}"))


def print_compacted(console: Console, result: SaveResult) -> None:
    if result.skipped:
        console.print(_text(f"step {result.step} is a full checkpoint already: nothing to do"))
    else:
        written = f"{size(result.bytes_written)} in {result.seconds:.1f} s"
        console.print(_text(f"step {result.step} is now a full checkpoint: {written}"))


def print_update(console: Console, update: Update) -> None:
    """Print one line and flush it."""
    upon = "" if update.previous is None else f" upon {update.previous}"
    tables = [f"{name} {_change(table)}" for name, table in update.tables.items()]
    console.print(_text("  ".join([f"step {update.step}", f"{update.kind}{upon}", *tables])), soft_wrap=True)
    console.file.flush()


def print_error(console: Console, error: CheckpointError) -> None:
    console.print(_text(f"asyncckpt: {error}"), soft_wrap=True)


def size(bytes: int) -> str:
    """Return bytes with a unit, three to four digits."""
    value = float(bytes)
    for unit in _UNITS:
        if value < 1000 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    raise AssertionError("the last unit ends the loop")


def _kind(info: CheckpointInfo) -> str:
    return "compacted" if info.compacted else info.kind


def _chain(parents: Sequence[int]) -> str:
    shown = [str(step) for step in parents]
    if len(shown) > CHAIN_STEPS_SHOWN_MAX:
        more = f"... {len(shown) - CHAIN_STEPS_SHOWN_MAX + 1} more ..."
        shown = [*shown[: CHAIN_STEPS_SHOWN_MAX - 2], more, shown[-1]]
    return " -> ".join(shown) + " (full)"


def _tables(info: CheckpointInfo) -> Table:
    is_delta = bool(info.parents)
    table = _table(
        ("table", "left"), ("rows", "right"), *((("removed", "right"), ("holds", "left")) if is_delta else ())
    )
    for name, item in info.table_infos.items():
        changes = (f"{item.removed:,}", "all rows" if item.whole else "changes") if is_delta else ()
        table.add_row(_text(name), f"{item.rows:,}", *changes)
    return table


def _ranks(info: CheckpointInfo) -> Table:
    table = _table(("rank", "right"), ("files", "right"), ("size", "right"), ("table rows", "right"))
    for rank in info.ranks[:RANKS_SHOWN_MAX]:
        table.add_row(str(rank.rank), str(len(rank.files)), size(rank.bytes), f"{sum(rank.tables.values()):,}")
    if info.ranks_count > RANKS_SHOWN_MAX:
        table.add_row("...", "", "", "")
    return table


def _change(table: TableUpdate) -> str:
    rows = _count(table.rows_count, "row")
    if table.whole:
        return f"all {rows}"
    return f"{rows}, {table.removed_count:,} removed" if table.removed_count else rows


def _print_blocks(console: Console, blocks: Sequence[BlockInfo], count_max: int) -> None:
    shown = blocks[:count_max]
    if shown:
        table = _table(
            ("block", "left"), ("role", "left"), ("dtype", "left"), ("shape", "left"), ("size", "right"),
            ("file", "left"), ("offset", "right"),
        )  # fmt: skip
        for block in shown:
            table.add_row(
                _text(block.name), block.role, block.dtype, str(list(block.shape)), size(block.bytes), block.file,
                str(block.offset),
            )  # fmt: skip
        console.print(table)
    if len(blocks) > len(shown):
        console.print(f"and {_count(len(blocks) - len(shown), 'more block')} (--blocks, --json)")


def _print_errors(console: Console, findings: Sequence[Finding[object]]) -> None:
    for finding in findings:
        if finding.error is not None:
            console.print(_text(f"step {finding.step}: {finding.error}"), soft_wrap=True)


def _state(finding: Finding[object]) -> str:
    return type(finding.error).__name__.removesuffix("Error").lower()


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name, side in columns:
        table.add_column(name, justify="right" if side == "right" else "left", overflow="fold")
    return table


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _text(raw: str) -> Text:
    """Return foreign text without markup, with control characters as escapes."""
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in raw)
    return Text(safe)
