"""The commands that convert checkpoints of other libraries: import, export. They say how far they are on a terminal."""

from __future__ import annotations

import re
import sys
import threading
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from asyncckpt.cli import as_json
from asyncckpt.cli.answers import Commands, add_dry_run, add_json, asked, given, natural
from asyncckpt.cli.findings import ExitCode
from asyncckpt.cli.text import count_of, safe, size
from asyncckpt.errors import UsageError

if TYPE_CHECKING:
    from asyncckpt.formats.conversion import Converter
    from asyncckpt.native import Progress

TICK_S = 0.2
ENDING_S = 10.0  # A terminal that takes no text holds nothing up.
NAMES_CHARACTERS_MAX = 200
BAR_CHARACTERS = 30
# What a format has no place for: its kind, and where the facts name it.
LEFT_OUT = {
    "value": "left_out",
    "tensor": "left_out_tensors",
    "column": "left_out_columns",
    "table": "left_out_tables",
    "file": "left_out_files",
}
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_SIZE = re.compile(r"([0-9]{1,15})\s*([a-z]*)")


@dataclass(frozen=True)
class Format:
    """What a format is, and which options its import and its export take beside those of all."""

    what: str
    to_import: tuple[str, ...]
    to_export: tuple[str, ...]


FORMATS = {
    "dcp": Format("a directory of torch.distributed.checkpoint", ("parallel",), ()),
    "hf": Format("safetensors files as Hugging Face lays them out", ("parallel",), ("only", "shard_size")),
    "parquet": Format("tables as Parquet files, one of each", ("column", "parallel"), ("only",)),
    "recis": Format(
        "a directory of RecIS", ("column", "parallel"), ("only", "column", "parallel", "shards", "optimizer")
    ),
    "recsdk": Format("the tables that RecSDK saved", ("column", "parallel"), ("only", "column", "shards")),
    "torch": Format("a file of torch.save", ("parallel",), ("only",)),
}
_DESCRIBED = "; ".join(f"{name}: {found.what}" for name, found in FORMATS.items())


def add_commands(commands: Commands) -> None:
    more = f"Adds it as a step to TARGET, which is made if it is missing. SOURCE stays as it is. {_DESCRIBED}."
    made = commands.add("import", import_, "make a checkpoint from what another library wrote", more, directory=False)
    _add_arguments(
        made, source="the directory or file of the other library", target="a checkpoint directory, or its URL"
    )
    default = "one more than the newest; recis: from the name of SOURCE"
    made.add_argument("--step", metavar="STEP", type=natural, help=f"the step that it becomes; default: {default}")
    more = f"Writes the newest step, or --step. TARGET must not exist; it appears when it is complete. {_DESCRIBED}."
    made = commands.add("export", export, "write a checkpoint in the format of another library", more, directory=False)
    _add_arguments(made, source="a checkpoint directory, or its URL", target="the directory or file to make")
    made.add_argument("--step", metavar="STEP", type=natural, help="which step; default: the newest")
    made.add_argument(
        "--shard-size", metavar="SIZE", type=_size, help="hf: write files of at most SIZE, such as 500MB or 2GiB (5GB)"
    )
    made.add_argument(
        "--shards",
        metavar="N",
        type=_positive,
        help="recis: write N shards; default: as many as ranks saved. recsdk: N rank folders; default: ranks merged",
    )
    made.add_argument(
        "--only",
        metavar="NAME",
        help="write what is under NAME alone, without NAME in the names: `--only model` writes the state dict of the "
        "model (not dcp)",
    )
    made.add_argument("--optimizer", metavar="NAME", help="recis: sparse_adam, sparse_adamw or sparse_adamw_tf")


def _add_arguments(parser: ArgumentParser, *, source: str, target: str) -> None:
    parser.add_argument("format", metavar="FORMAT", choices=FORMATS, help=f"one of {', '.join(FORMATS)}")
    parser.add_argument("source", metavar="SOURCE", type=given, help=source)
    parser.add_argument("target", metavar="TARGET", type=given, help=target)
    parser.add_argument(
        "--column",
        metavar="SLOT=COLUMN",
        type=_pair,
        action="append",
        help="recis, recsdk: the column for a slot; parquet: the new name of a column",
    )
    parser.add_argument(
        "--parallel", metavar="N", type=_positive, help="write at most N files (recis: per shard); default 8"
    )
    parser.add_argument(
        "--rename",
        metavar="OLD=NEW",
        type=_pair,
        action="append",
        help="rename a table, a tensor, or everything called OLD.something",
    )
    parser.add_argument("--no-verify", action="store_true", help="do not read the result back and compare it")
    add_dry_run(parser)
    add_json(parser)


def import_(wanted: Namespace) -> ExitCode:
    options = asked(lambda: _options(wanted, FORMATS[wanted.format].to_import), json=wanted.json)
    converter = _converter(wanted.format)
    return _run(wanted, "import", converter.look_into, converter.import_with, options)


def export(wanted: Namespace) -> ExitCode:
    options = asked(lambda: _options(wanted, FORMATS[wanted.format].to_export), json=wanted.json)
    converter = _converter(wanted.format)
    return _run(wanted, "export", converter.plan_export, converter.export_with, options)


def _run(
    wanted: Namespace,
    what: str,
    plan: Callable[..., Mapping[str, Any]],
    convert: Callable[..., Mapping[str, Any]],
    options: Mapping[str, Any],
) -> ExitCode:
    from asyncckpt.formats.conversion import Conversion

    options = dict(options)
    parallel, only = options.pop("parallel", None), options.pop("only", None)

    def of(progress: Progress | None = None) -> Conversion:
        return Conversion.of(
            *(wanted.source, wanted.target, wanted.step),
            parallel=parallel,
            verify=not wanted.no_verify,
            progress=progress,
            rename=_renamed(wanted.rename),
            only=only,
        )

    if wanted.dry_run:
        return _tell(wanted, asked(lambda: plan(of(), **options), json=wanted.json), f"would {what}")
    with _shown(f"{what}ing") as progress:
        facts = asked(lambda: convert(of(progress), **options), json=wanted.json)
    return _tell(wanted, facts, f"{what}ed")


def _converter(name: str) -> Converter:
    """Return what converts a format. What it needs is imported here: the other commands start without it."""
    if name == "dcp":
        from asyncckpt.formats.dcp import convert as dcp

        return dcp
    if name == "hf":
        from asyncckpt.formats import hf

        return hf.CONVERTER
    if name == "parquet":
        from asyncckpt.formats import parquet

        return parquet.CONVERTER
    if name == "recis":
        from asyncckpt.formats import recis

        return recis.CONVERTER
    if name == "recsdk":
        from asyncckpt.formats import recsdk

        return recsdk.CONVERTER
    from asyncckpt.formats.torch_file import convert as torch_file

    return torch_file


def _options(wanted: Namespace, taken: Sequence[str]) -> dict[str, Any]:
    """Return the options that were given. UsageError for one that the format does not take."""
    every = dict.fromkeys(name for found in FORMATS.values() for name in (*found.to_import, *found.to_export))
    given = {name: value for name in every if (value := getattr(wanted, name, None)) is not None}
    for name in given:
        if name not in taken:
            hint = f"its options: {', '.join(map(_option, taken))}" if taken else None
            raise UsageError(f"{_option(name)} does not apply to {wanted.format}", hint=hint)
    if "column" in given:
        given["columns"] = dict(given.pop("column"))
    return given


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _tell(wanted: Namespace, facts: Mapping[str, Any], done: str) -> ExitCode:
    if wanted.json:
        as_json.print_answer({"dry_run": wanted.dry_run, **facts})
        return ExitCode.OK
    tables: Mapping[str, int] = facts.get("tables", {})
    found = (
        [f"{count_of(len(tables), 'table')} of {count_of(sum(tables.values()), 'row')}"] if "tables" in facts else []
    )
    found += [count_of(facts["tensors"], "tensor")]
    found += [count_of(facts["values"], "plain value")] if "values" in facts else []
    found += [count_of(facts["shards"], "shard")] if "shards" in facts else []
    step = "" if facts["step"] is None else f" step {facts['step']}"
    taken = f" in {facts['seconds']:.1f} s" if "seconds" in facts else ""
    print(f"{done}{step}: {', '.join([*found, size(facts['bytes'])])}{taken}")
    if facts.get("reused"):
        print(f"{size(facts['reused'])} of it {'are' if wanted.dry_run else 'were'} written already, by an earlier try")
    for noun in LEFT_OUT:
        if names := facts.get(LEFT_OUT[noun]):
            print(f"left out: {count_of(len(names), noun)}: {_listed(names)}")
    return ExitCode.OK


def _listed(names: Sequence[str]) -> str:
    """Return names, whole ones; of many only the first."""
    ends = accumulate(len(name) + 2 for name in names)
    shown = max(1, sum(end <= NAMES_CHARACTERS_MAX for end in ends))
    more = f" and {len(names) - shown:,} more (--json)" if shown < len(names) else ""
    return safe(", ".join(names[:shown])) + more


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
            print(f"\r\x1b[K{what}: {_bar(progress)}{size(progress.bytes_done)}", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, name="asyncckpt-shown")
    thread.start()
    try:
        yield progress
    finally:
        ended.set()
        thread.join(ENDING_S)
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _bar(progress: Progress) -> str:
    """Return how much of what is expected is done, once that is known."""
    if not progress.bytes_expected:
        return ""
    share = min(1.0, progress.bytes_done / progress.bytes_expected)
    return f"[{'#' * int(BAR_CHARACTERS * share):<{BAR_CHARACTERS}}] {share:.0%}  "


def _renamed(pairs: Sequence[tuple[str, str]] | None) -> dict[str, str]:
    """Return what --rename has said. UsageError."""
    given = dict(pairs or ())
    if len(given) != len(pairs or ()):
        raise UsageError("--rename maps one name twice", found=[f"{old}={new}" for old, new in pairs or ()])
    return given


def _pair(text: str) -> tuple[str, str]:
    slot, found, column = text.partition("=")
    if not found or not slot or not column:
        raise ArgumentTypeError(f"{text!r} is not OLD=NEW")
    return slot, column


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.lower())
    if match is None or match[2] not in _UNITS or not int(match[1]):
        raise ArgumentTypeError(f"{text!r} is not a size such as 5GB, 500MiB or 1000000")
    return int(match[1]) * _UNITS[match[2]]
