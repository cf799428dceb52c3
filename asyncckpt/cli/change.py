"""The commands that change a directory: compact, rm, prune, pin, unpin, gc. Each says what it did, or would do."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from typing import Any

from asyncckpt import checkpoints
from asyncckpt.cli import as_json, screen
from asyncckpt.cli.answers import Commands, add_dry_run, add_json, add_step, asked, natural, said
from asyncckpt.cli.findings import ExitCode
from asyncckpt.cli.text import count_of, print_columns, size

STEPS_SHOWN_MAX = 20  # On a line for people; --json has all of them.


def add_commands(commands: Commands) -> None:
    more = "Stop training that writes to DIR first."
    made = commands.add("compact", compact, "turn a delta and its chain into one full checkpoint of its step", more)
    add_step(made)
    add_json(made)
    more = "Refuses a checkpoint that a remaining delta is based on. Stop training that writes to DIR first."
    made = commands.add("rm", rm, "delete checkpoints permanently, all of those named or none", more)
    made.add_argument("steps", metavar="STEP", type=natural, nargs="*", help="which checkpoints")
    made.add_argument("--after", metavar="STEP", type=natural, help="delete all above this step instead")
    made.add_argument("--even-pinned", action="store_true", help="remove pinned checkpoints too")
    add_dry_run(made)
    add_json(made)
    _add_prune(commands)
    for name, command, what in (
        ("pin", pin, "keep a checkpoint and its bases, whatever retention says"),
        ("unpin", unpin, "unpin a checkpoint, so that retention may remove it"),
    ):
        made = commands.add(name, command, what, "Works while training writes to DIR.")
        made.add_argument("step", metavar="STEP", type=natural, help="which checkpoint")
        add_json(made)
    more = "The next save to DIR does the same. Stop training that writes to DIR first."
    made = commands.add("gc", gc, "remove leftovers of failed saves and crashes", more)
    add_json(made)


def _add_prune(commands: Commands) -> None:
    made = commands.add(
        "prune",
        prune,
        "remove the checkpoints that no rule keeps",
        "Works as the `keep` of a Saver. Pinned checkpoints stay, and the bases of those that stay. Stop training "
        "that writes to DIR first; --dry-run works meanwhile.",
    )
    made.add_argument("--latest", type=_positive, required=True, metavar="N", help="keep the newest N")
    made.add_argument("--every-steps", type=_positive, metavar="N", help="also keep the first in every N steps")
    made.add_argument("--every-hours", type=float, metavar="H", help="also keep the first in every H hours")
    made.add_argument("--best", type=_positive, metavar="N", help="also keep the N with the best metric")
    made.add_argument("--metric", metavar="NAME", help="the name of a number in the metadata")
    made.add_argument("--mode", choices=("min", "max"), default="min", help="which value is best (min)")
    add_dry_run(made)
    add_json(made)


def compact(wanted: Namespace) -> ExitCode:
    from asyncckpt.compaction import compact as compact_step

    with said("compacting"):
        result = asked(lambda: compact_step(wanted.path, wanted.step), json=wanted.json)
    (as_json if wanted.json else screen).print_compacted(result)
    return ExitCode.OK


def rm(wanted: Namespace) -> ExitCode:
    if bool(wanted.steps) == (wanted.after is not None):
        screen.complain("rm", "pass STEPs, or --after STEP")
        return ExitCode.USAGE

    def remove() -> list[int]:
        options = {"even_pinned": wanted.even_pinned, "dry_run": wanted.dry_run}
        if wanted.after is not None:
            return checkpoints.remove_after(wanted.path, wanted.after, **options)
        return checkpoints.remove(wanted.path, wanted.steps, **options)

    with said("removing"):
        removed = asked(remove, json=wanted.json)
    _tell(wanted, {"removed": removed}, f"{_done(wanted)} {_steps(removed)}")
    return ExitCode.OK


def prune(wanted: Namespace) -> ExitCode:
    from asyncckpt.options import KeepPolicy

    names = ("latest", "every_steps", "every_hours", "best", "metric", "mode")

    def ask() -> Any:
        policy = KeepPolicy(**{name: getattr(wanted, name) for name in names})
        return checkpoints.prune(wanted.path, policy, dry_run=wanted.dry_run)

    with said("pruning"):
        report = asked(ask, json=wanted.json)
    answer = {
        "removed": list(report.removed),
        "bytes": report.bytes,
        "kept": {str(s): r for s, r in report.kept.items()},
        "damaged": {str(s): why for s, why in report.damaged.items()},
    }
    _tell(wanted, answer, f"{_done(wanted)} {_steps(report.removed)}, {size(report.bytes)}")
    if not wanted.json and report.kept:
        print_columns(
            ["kept", "for"], [[str(step), ", ".join(why)] for step, why in report.kept.items()], right=["kept"]
        )
    for step, wrong in () if wanted.json else report.damaged.items():
        print(f"step {step} cannot be used, and counts for no rule: {wrong}")
    return ExitCode.DAMAGED if report.damaged else ExitCode.OK


def pin(wanted: Namespace) -> ExitCode:
    asked(lambda: checkpoints.pin(wanted.path, wanted.step), json=wanted.json)
    _tell(wanted, {"step": wanted.step, "pinned": True}, f"step {wanted.step} is pinned")
    return ExitCode.OK


def unpin(wanted: Namespace) -> ExitCode:
    was = asked(lambda: checkpoints.unpin(wanted.path, wanted.step), json=wanted.json)
    text = f"step {wanted.step} is no longer pinned" if was else f"step {wanted.step} was not pinned: nothing to do"
    _tell(wanted, {"step": wanted.step, "pinned": False, "was_pinned": was}, text)
    return ExitCode.OK


def gc(wanted: Namespace) -> ExitCode:
    with said("removing leftovers"):
        report = asked(lambda: checkpoints.collect_garbage(wanted.path), json=wanted.json)
    found = f"{count_of(report.folders_count, 'folder')}, {count_of(report.files_count, 'file')}, {size(report.bytes)}"
    sessions = f", {count_of(report.sessions_count, 'session')} of ranks" if report.sessions_count else ""
    _tell(wanted, vars(report), f"removed leftovers: {found}{sessions}")
    return ExitCode.OK


def _tell(wanted: Namespace, facts: dict[str, Any], text: str) -> None:
    if not wanted.json:
        print(text)
        return
    dry_run = {"dry_run": wanted.dry_run} if "dry_run" in wanted else {}
    as_json.print_answer({"path": str(wanted.path), **dry_run, **facts})


def _done(wanted: Namespace) -> str:
    return "would remove" if wanted.dry_run else "removed"


def _steps(steps: Sequence[int]) -> str:
    """Return how many checkpoints these are, and which: of many, the first and the last ones."""
    shown = [*map(str, steps)]
    if len(shown) > STEPS_SHOWN_MAX:
        shown = [*shown[:3], f"... {len(shown) - 6} more ...", *shown[-3:]]
    return count_of(len(steps), "checkpoint") + (f": {', '.join(shown)}" if shown else "")


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)
