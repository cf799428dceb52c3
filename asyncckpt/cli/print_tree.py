"""The tree of a checkpoint, as lines and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncckpt.cli.text import count_of, safe, shown_value
from asyncckpt.inspection import Entry, Outline


def tree_lines(outline: Outline) -> Iterator[str]:
    """Return a line for each entry, indented below what it is in."""
    yield f"step {outline.step}"
    for entry in outline.entries:
        key = entry.path[-1]
        name = key if isinstance(key, str) else repr(key)
        yield safe(f"{'  ' * len(entry.path)}{name}: {_what(entry)}")


def tree_answer(outline: Outline) -> dict[str, Any]:
    """`{"step": ..., "entries": [{"path": ["model", "weight"], "kind": "tensor", "dtype": ..., "shape": ...}]}`"""
    return {"step": outline.step, "entries": [_facts(entry) for entry in outline.entries]}


def _what(entry: Entry) -> str:
    if entry.kind == "value":
        return shown_value(entry.value)
    if entry.kind == "table":
        return f"table, {count_of(entry.count or 0, 'row')}"
    if entry.count is not None:
        return f"{entry.kind} of {entry.count:,}"
    if entry.dtype is None:
        return f"{entry.kind}, left out by a filter"
    return " ".join([entry.kind, entry.dtype, *([str(list(entry.shape))] if entry.shape else [])])


def _facts(entry: Entry) -> dict[str, Any]:
    facts: dict[str, Any] = {"path": list(entry.path), "kind": entry.kind}
    if entry.kind == "value":
        return {**facts, "value": entry.value}
    if entry.count is not None:
        return {**facts, "count": entry.count}
    return {**facts, "dtype": entry.dtype, "shape": entry.shape}
