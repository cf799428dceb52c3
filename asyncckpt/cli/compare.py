"""The commands that look at numbers: diff compares two checkpoints, cat prints rows of a table."""

from __future__ import annotations

import contextlib
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncckpt.checkpoints import list_steps
from asyncckpt.cli import as_json, screen
from asyncckpt.cli.answers import Commands, add_json, add_most, asked, natural, place, said
from asyncckpt.cli.findings import ExitCode
from asyncckpt.cli.text import count_of, print_columns, safe, shown_value
from asyncckpt.errors import NotFoundError, Words
from asyncckpt.inspection import Comparison, compare, find_rows

if TYPE_CHECKING:
    import torch

    from asyncckpt.engine.inspect.compare import TableChange
    from asyncckpt.engine.inspect.table_rows import FoundRows
    from asyncckpt.native import I64

LOOKS_MAX = 9
_NUMBERS = frozenset({"was", "is", "added", "removed", "changed", "rows", "max abs", "cosine"})


def add_commands(commands: Commands) -> None:
    made = commands.add(
        "diff",
        diff,
        "print the differences between two checkpoints",
        "Compares rows by their ids, tensors, plain values and metadata. Reads only what may differ, in windows. Exits "
        "with 7 if the states differ, with 0 if they are the same.",
    )
    made.add_argument("first", metavar="A", type=natural, nargs="?", help="a step; default: the second newest")
    made.add_argument("second", metavar="B", type=natural, nargs="?", help="another step; default: the newest")
    made.add_argument("--with", dest="other", metavar="DIR2", type=place, help="take B from this directory")
    made.add_argument("--top", metavar="N", type=natural, help="print the N rows of each table that changed most")
    add_most(made, "lines of a kind, and ids (default 40)")
    add_json(made)
    made = commands.add(
        "cat",
        cat,
        "print rows of a table by their ids",
        "Reads the ids of the table, and only these rows of its columns. Without ids, prints the first rows.",
    )
    made.add_argument("table", metavar="TABLE", help="the name of a table, as `show` prints it")
    made.add_argument("ids", metavar="ID", type=_id, nargs="*", help="an int64 id; default: the lowest ids there")
    add_most(made, "rows, where no ids are given (default 40)")
    made.add_argument("--step", metavar="STEP", type=natural, help="which checkpoint; default: the newest")
    add_json(made)


def diff(wanted: Namespace) -> ExitCode:
    with said("comparing"):
        found = asked(lambda: _compared(wanted), json=wanted.json)
    if wanted.json:
        as_json.print_answer(_diff_answer(found, wanted))
    else:
        _print_diff(found, count_max=wanted.most)
        _print_top(found, wanted.top or 0)
    return ExitCode.OK if found.is_same else ExitCode.DIFFERENT


def _compared(wanted: Namespace) -> Comparison:
    """Compare what is wanted; look again when retention has removed the second newest step meanwhile."""
    if wanted.first is not None or wanted.other is not None:
        return compare(wanted.path, wanted.first, wanted.second, other_path=wanted.other)
    steps: list[int] = []
    for _ in range(LOOKS_MAX):
        before, steps = steps, list_steps(wanted.path)
        if len(steps) < 2 or steps == before:
            break
        with contextlib.suppress(NotFoundError):
            return compare(wanted.path, steps[-2], wanted.second)
    if len(steps) < 2:
        raise NotFoundError(f"there are no two checkpoints in {str(wanted.path)!r}", found=Words(f"steps {steps}"))
    return compare(wanted.path, steps[-2], wanted.second)


def cat(wanted: Namespace) -> ExitCode:
    with said("looking for rows"):
        find = partial(find_rows, wanted.path, wanted.table, wanted.ids or None, wanted.step, most=wanted.most)
        found = asked(find, json=wanted.json)
    columns = {name: _numbers(values) for name, values in found.columns.items()}
    if wanted.json:
        rows = [
            {"id": id, **{name: values[row].tolist() for name, values in columns.items()}}
            for row, id in enumerate(found.ids.tolist())
        ]
        answer = {"path": str(wanted.path), "table": wanted.table, "rows": rows, "missing": found.missing.tolist()}
        as_json.print_answer(answer)
    elif len(found.ids):
        _print_rows(found, columns)
    if len(found.missing):
        ids = ", ".join(map(str, found.missing.tolist()))
        screen.complain("cat", f"table {safe(wanted.table)!r} holds no row with id {ids}")
        return ExitCode.NOT_FOUND
    return ExitCode.OK


def _id(text: str) -> int:
    try:
        id = int(text, 0)
    except ValueError:
        id = 1 << 63
    if not -(1 << 63) <= id < 1 << 63:
        raise ArgumentTypeError(f"{text!r} is not an int64")
    return id


def _print_rows(found: FoundRows, columns: Mapping[str, Any]) -> None:
    rows = []
    for row, id in enumerate(found.ids.tolist()):
        cells = [" ".join(map(str, values[row].reshape(-1))) for values in columns.values()]
        rows.append([str(id), *cells])
    print_columns(["id", *columns], rows, right={"id"})


def _numbers(values: torch.Tensor) -> Any:
    """Return a column as an array of numbers that NumPy knows, [rows, ...]; of others, their bytes."""
    import torch

    from asyncckpt.engine.inspect.stored_values import bits_of

    try:
        if values.dtype.is_floating_point and values.dtype.itemsize < 4:
            return values.to(torch.float32).numpy()
        return values.numpy()
    except (RuntimeError, TypeError, NotImplementedError):
        return bits_of(values).numpy()


def _print_diff(found: Comparison, *, count_max: int) -> None:
    if found.is_same and not found.metadata:
        print(
            f"steps {found.step} and {found.other_step} hold the same: {count_of(found.compared, 'entry', 'entries')}"
        )
        return
    print(f"from step {found.step} to step {found.other_step}")
    tables = [
        [
            name,
            _shown(t.rows_before),
            _shown(t.rows_after),
            *(f"{len(ids):,}" for ids in (t.added, t.removed, t.changed)),
        ]
        for name, t in found.tables.items()
    ]
    _print_part(["table", "was", "is", "added", "removed", "changed"], tables, count_max)
    ids = [
        [name, what, " ".join(map(str, some[:count_max].tolist())) + (" ..." if len(some) > count_max else "")]
        for name, table in found.tables.items()
        for what, some in (("added", table.added), ("removed", table.removed), ("changed", table.changed))
        if len(some)
    ]
    _print_part(["rows of", "were", "ids"], ids, 3 * count_max)
    columns = [
        [f"{name}@{column}", *_forms(c.before, c.after), f"{c.rows:,}", _shown(c.max_abs), _shown(c.cosine)]
        for name, table in found.tables.items()
        for column, c in table.columns.items()
    ]
    _print_part(["column", "form", "rows", "max abs", "cosine"], columns, count_max)
    tensors = [
        [name, t.kind, *_forms(t.before, t.after), _shown(t.max_abs), _shown(t.cosine)]
        for name, t in found.tensors.items()
    ]
    _print_part(["tensor", "was", "form", "max abs", "cosine"], tensors, count_max)
    for what, changes in (("value", found.values), ("metadata", found.metadata)):
        rows = [[name, *(shown_value(side[0]) if side else "" for side in both)] for name, both in changes.items()]
        _print_part([what, "was", "is"], rows, count_max, right=())


def _top(table: TableChange, count: int) -> list[tuple[int, float]]:
    """Return the ids of the rows that changed most, the most first, and by how much."""
    order = (-table.max_abs).argsort(kind="stable")[:count]
    return list(zip(table.changed[order].tolist(), table.max_abs[order].tolist(), strict=True))


def _print_top(found: Comparison, count: int) -> None:
    rows = [[name, str(id), _shown(by)] for name, table in found.tables.items() for id, by in _top(table, count)]
    _print_part(["changed most in", "id", "max abs"], rows, len(rows))


def _print_part(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    count_max: int,
    *,
    right: Sequence[str] | frozenset[str] = _NUMBERS,
) -> None:
    if not rows:
        return
    print()
    print_columns(heads, rows[:count_max], right=right if "form" not in heads else _NUMBERS - {"was"})
    if len(rows) > count_max:
        print(f"and {len(rows) - count_max:,} more (--most, --json)")


def _forms(before: str | None, after: str | None) -> list[str]:
    """Return what something is, as one cell, "was -> is" where that has changed."""
    return [" -> ".join(dict.fromkeys(form for form in (before, after) if form is not None))]


def _shown(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:,}" if isinstance(number, int) else f"{number:.6g}"


def _diff_answer(found: Comparison, wanted: Namespace) -> dict[str, Any]:
    """`{"step": ..., "other_step": ..., "same": ..., "tables": {...}, "tensors": {...}, "values": {...}, ...}`"""
    tables = {}
    for name, table in found.tables.items():
        ids = {"added": table.added, "removed": table.removed, "changed": table.changed}
        tables[name] = {
            "kind": table.kind,
            "rows_before": table.rows_before,
            "rows_after": table.rows_after,
            **{what: _ids_answer(some, wanted.most) for what, some in ids.items()},
            "top": [{"id": id, "max_abs": by} for id, by in _top(table, wanted.top or 0)],
            "columns": {column: vars(change) for column, change in table.columns.items()},
        }
    return {
        "path": str(wanted.path),
        "step": found.step,
        "other_path": str(wanted.path if wanted.other is None else wanted.other),
        "other_step": found.other_step,
        "same": found.is_same,
        "tables": tables,
        "tensors": {name: {"kind": tensor.kind, **vars(tensor)} for name, tensor in found.tensors.items()},
        "values": _pairs_answer(found.values),
        "metadata": _pairs_answer(found.metadata),
    }


def _ids_answer(ids: I64, count_max: int) -> dict[str, Any]:
    return {"count": len(ids), "ids": ids[:count_max].tolist()}


def _pairs_answer(changes: Mapping[str, tuple[tuple[Any, ...], tuple[Any, ...]]]) -> dict[str, Any]:
    """Return lists of one value, or of none where it is not there."""
    return {name: {"before": list(before), "after": list(after)} for name, (before, after) in changes.items()}
