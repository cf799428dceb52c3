"""Answers for people: tables on a terminal, the same text in a pipe.

Names come from a file that anybody may have written, so nothing in them is taken as markup or as a control code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncckpt.checkpoints import BlockInfo, CheckpointInfo
from asyncckpt.cli.finding import Finding
from asyncckpt.engine.verify import VerifyReport
from asyncckpt.errors import CheckpointError

PIPE_WIDTH = 200
METADATA_CHARACTERS_MAX = 2000
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def print_list(console: Console, path: Path, findings: Sequence[Finding[CheckpointInfo]]) -> None:
    """A line per checkpoint; damaged ones are named as such, with the reason below."""
    if not findings:
        console.print(_text(f"no checkpoints in {path}"))
        return
    table = _table(
        ("step", "right"), ("created", "left"), ("kind", "left"), ("size", "right"), ("files", "right"),
        ("table rows", "right"), ("tensors", "right"), ("state", "left"),
    )  # fmt: skip
    for finding in findings:
        info = finding.fact
        if info is None:
            table.add_row(str(finding.step), *["-"] * 6, Text(_state(finding), style="red"))
            continue
        rows_count = sum(info.tables.values())
        dense_count = len({block.name for block in info.blocks if block.role == "dense"})
        table.add_row(
            str(info.step), _text(info.created), info.kind, size(info.bytes), str(len(info.files)), f"{rows_count:,}",
            f"{dense_count:,}", "committed",
        )  # fmt: skip
    console.print(table)
    _print_errors(console, findings)


def print_info(console: Console, path: Path, info: CheckpointInfo, *, blocks_count_max: int) -> None:
    """One checkpoint: head, tables, blocks, files."""
    facts = Table.grid(padding=(0, 2))
    facts.add_row("checkpoint", _text(f"step {info.step} of {path}"))
    facts.add_row("kind", info.kind)
    facts.add_row("created", _text(f"{info.created} by {info.writer}"))
    facts.add_row("size", f"{size(info.bytes)} in {_count(len(info.files), 'file')}")
    facts.add_row("digest", info.digest)
    if info.metadata:
        facts.add_row("metadata", _text(repr(dict(info.metadata))[:METADATA_CHARACTERS_MAX]))
    console.print(facts)
    if info.tables:
        table = _table(("table", "left"), ("rows", "right"))
        for name, rows_count in info.tables.items():
            table.add_row(_text(name), f"{rows_count:,}")
        console.print(table)
    _print_blocks(console, info.blocks, blocks_count_max)
    files = _table(("file", "left"))
    for file in info.files:
        files.add_row(file)
    console.print(files)


def print_verified(console: Console, path: Path, findings: Sequence[Finding[VerifyReport]]) -> None:
    """A line per verified checkpoint, then what is wrong and what lies beside."""
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


def print_error(console: Console, error: CheckpointError) -> None:
    console.print(_text(f"asyncckpt: {error}"), soft_wrap=True)


def size(bytes: int) -> str:
    """Bytes with a unit, three to four digits."""
    value = float(bytes)
    for unit in _UNITS:
        if value < 1000 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    raise AssertionError("the last unit ends the loop")


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
    """Foreign text: no markup, and control characters as escapes."""
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in raw)
    return Text(safe)
