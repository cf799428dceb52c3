"""The commands that convert checkpoints of other libraries: import, export. They say how far they are on a terminal."""

from __future__ import annotations

import sys
import threading
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncckpt.cli import as_json
from asyncckpt.cli.answers import Commands, add_dry_run, add_json, asked, natural
from asyncckpt.cli.findings import ExitCode
from asyncckpt.cli.text import count_of, safe, size

if TYPE_CHECKING:
    from asyncckpt.native import Progress

FORMATS = ("recis",)
TICK_S = 0.2
ENDING_S = 10.0  # A terminal that takes no text holds nothing up.
NAMES_CHARACTERS_MAX = 200


def add_commands(commands: Commands) -> None:
    more = "As a step of a directory of asyncckpt, which is made when it is missing. SOURCE stays as it is."
    made = commands.add("import", import_, "make a checkpoint of what another library wrote", more, directory=False)
    _add_arguments(made, source="the directory of the other library", target="a checkpoint directory")
    made.add_argument("--step", metavar="STEP", type=natural, help="which step it becomes; default: of SOURCE's name")
    more = "The newest step, or --step. TARGET must not exist, and is there all at once."
    made = commands.add("export", export, "write a checkpoint as another library reads it", more, directory=False)
    _add_arguments(made, source="a checkpoint directory", target="the directory to make")
    made.add_argument("--step", metavar="STEP", type=natural, help="which step; default: the newest")
    made.add_argument(
        "--shards", metavar="N", type=_positive, help="in how many shards; default: as many as ranks saved"
    )
    made.add_argument("--optimizer", metavar="NAME", help="sparse_adam, sparse_adamw or sparse_adamw_tf")


def _add_arguments(parser: ArgumentParser, *, source: str, target: str) -> None:
    parser.add_argument("format", metavar="FORMAT", choices=FORMATS, help=f"whose format: {', '.join(FORMATS)}")
    parser.add_argument("source", metavar="SOURCE", type=Path, help=source)
    parser.add_argument("target", metavar="TARGET", type=Path, help=target)
    parser.add_argument(
        "--column", metavar="SLOT=COLUMN", type=_pair, action="append", default=[], help="what a slot is called here"
    )
    parser.add_argument("--parallel", metavar="N", type=_positive, default=8, help="files of a shard, at most (8)")
    parser.add_argument("--no-verify", action="store_true", help="do not read it once more in the end")
    add_dry_run(parser)
    add_json(parser)


def import_(wanted: Namespace) -> ExitCode:
    from asyncckpt.formats.recis.convert import import_with, look_into

    columns = dict(wanted.column)
    if wanted.dry_run:
        facts = asked(lambda: look_into(wanted.source, wanted.target, wanted.step, columns), json=wanted.json)
        return _tell(wanted, facts, "would import")
    with _shown("importing") as progress:
        facts = asked(
            lambda: import_with(
                wanted.source,
                wanted.target,
                wanted.step,
                columns,
                parallel=wanted.parallel,
                verify=not wanted.no_verify,
                progress=progress,
            ),
            json=wanted.json,
        )
    return _tell(wanted, facts, "imported")


def export(wanted: Namespace) -> ExitCode:
    from asyncckpt.formats.recis.convert import export_with, plan_export

    names = {"shards": wanted.shards, "columns": dict(wanted.column), "optimizer": wanted.optimizer}
    if wanted.dry_run:
        facts = asked(lambda: plan_export(wanted.source, wanted.target, wanted.step, **names), json=wanted.json)
        return _tell(wanted, facts, "would export")
    with _shown("exporting") as progress:
        facts = asked(
            lambda: export_with(
                wanted.source,
                wanted.target,
                wanted.step,
                parallel=wanted.parallel,
                verify=not wanted.no_verify,
                progress=progress,
                **names,
            ),
            json=wanted.json,
        )
    return _tell(wanted, facts, "exported")


def _tell(wanted: Namespace, facts: Mapping[str, Any], done: str) -> ExitCode:
    if wanted.json:
        as_json.print_answer({"dry_run": wanted.dry_run, **facts})
        return ExitCode.OK
    tables: Mapping[str, int] = facts["tables"]
    rows = f"{count_of(len(tables), 'table')} of {count_of(sum(tables.values()), 'row')}"
    found = [rows, count_of(facts["tensors"], "tensor"), count_of(facts["shards"], "shard"), size(facts["bytes"])]
    step = "" if facts["step"] is None else f" step {facts['step']}"
    taken = f" in {facts['seconds']:.1f} s" if "seconds" in facts else ""
    print(f"{done}{step}: {', '.join(found)}{taken}")
    if facts["left_out"]:
        print(
            f"left out: {count_of(len(facts['left_out']), 'plain value')}: {safe(', '.join(facts['left_out'])[:200])}"
        )
    return ExitCode.OK


@contextmanager
def _shown(what: str) -> Iterator[Progress]:
    """Say on a terminal how many bytes are written and read back; the line goes when it is done."""
    from asyncckpt.native import Progress

    progress = Progress()
    if not sys.stderr.isatty():
        yield progress
        return
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(TICK_S):
            print(f"\r\x1b[K{what}: {size(progress.bytes_done)}", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, name="asyncckpt-shown")
    thread.start()
    try:
        yield progress
    finally:
        ended.set()
        thread.join(ENDING_S)
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _pair(text: str) -> tuple[str, str]:
    slot, found, column = text.partition("=")
    if not found or not slot or not column:
        raise ArgumentTypeError(f"{text!r} is not SLOT=COLUMN")
    return slot, column


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)
