"""The commands that look at checkpoints one by one: ls, show, tree, verify."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncckpt.checkpoints import CheckpointSummary, VerifyReport, describe, list_steps, summaries
from asyncckpt.checkpoints import verify as verify_step
from asyncckpt.cli import as_json, screen
from asyncckpt.cli.answers import Answer, Commands, add_json, add_most, add_step, asked, natural, said
from asyncckpt.cli.findings import ExitCode, Finding, worst_code
from asyncckpt.cli.print_tree import tree_answer, tree_lines
from asyncckpt.errors import CheckpointError, NotFoundError
from asyncckpt.inspection import outline

LOOKS_MAX = 9


def add_commands(commands: Commands) -> None:
    made = commands.add("ls", ls, "list the checkpoints of a directory, the newest last", "Reads only manifests.")
    made.add_argument("--metadata", action="store_true", help="show metadata")
    made.add_argument("--after", metavar="STEP", type=natural, help="list only steps above this one")
    made.add_argument("--kind", choices=("full", "delta"), help="list only checkpoints of this kind, and damaged ones")
    add_most(made, "of the newest checkpoints (default 40; --json lists all)")
    add_json(made)
    more = "Prints tables, plain values, tensors, metadata and files. Reads only the manifest."
    made = commands.add("show", show, "show what one checkpoint holds", more)
    add_step(made)
    add_most(made, "values and blocks (default 40; --json shows all)")
    add_json(made)
    more = "Prints containers, types, shapes and plain values, in their order. Reads only the manifest."
    made = commands.add("tree", tree, "show the state of one checkpoint as a tree", more)
    add_step(made)
    add_json(made)
    more = "Checks the manifest, file sizes, headers and the digest of every block."
    made = commands.add("verify", verify, "read every byte of a checkpoint and check it", more)
    add_step(made)
    made.add_argument("--all", action="store_true", help="verify every checkpoint of the directory")
    add_json(made)


def ls(wanted: Namespace) -> ExitCode:
    found = asked(lambda: summaries(wanted.path), json=wanted.json)
    findings = [
        _finding(step, answer)
        for step, answer in found.items()
        if (wanted.after is None or step > wanted.after) and wanted.kind in (None, getattr(answer, "kind", wanted.kind))
    ]
    if wanted.json:
        as_json.print_list(wanted.path, findings)
    else:
        screen.print_list(wanted.path, findings, has_metadata=wanted.metadata, count_max=wanted.most)
    return worst_code(findings)


def show(wanted: Namespace) -> ExitCode:
    info = asked(lambda: describe(wanted.path, wanted.step), json=wanted.json)
    if wanted.json:
        as_json.print_info(wanted.path, info)
    else:
        screen.print_info(wanted.path, info, count_max=wanted.most)
    return ExitCode.OK


def tree(wanted: Namespace) -> ExitCode:
    found = asked(lambda: outline(wanted.path, wanted.step), json=wanted.json)
    if wanted.json:
        as_json.print_answer({"path": str(wanted.path), **tree_answer(found)})
    else:
        print("\n".join(tree_lines(found)))
    return ExitCode.OK


def verify(wanted: Namespace) -> ExitCode:
    if wanted.all and wanted.step is not None:
        screen.complain("verify", "pass a STEP or --all, not both")
        return ExitCode.USAGE
    findings: list[Finding[VerifyReport]] = []
    for looks_left in reversed(range(LOOKS_MAX)):
        steps = asked(lambda: _steps_to_verify(wanted.path, wanted.step, everything=wanted.all), json=wanted.json)
        findings = _verified(wanted.path, steps, keep_missing=wanted.step is not None or not looks_left)
        if findings:  # Else retention has removed what was the newest.
            break
    (as_json if wanted.json else screen).print_verified(wanted.path, findings)
    return worst_code(findings)


def _finding(step: int, answer: CheckpointSummary | CheckpointError) -> Finding[CheckpointSummary]:
    if isinstance(answer, CheckpointError):
        return Finding(step=step, error=answer)
    return Finding(step=step, fact=answer)


def _steps_to_verify(path: Path, step: int | None, *, everything: bool) -> list[int]:
    if step is not None:
        return [step]
    steps = list_steps(path)
    if not steps:
        raise NotFoundError(f"there is no checkpoint in {str(path)!r}")
    return steps if everything else steps[-1:]


def _verified(path: Path, steps: Sequence[int], *, keep_missing: bool) -> list[Finding[VerifyReport]]:
    """Verify these steps; skip those that retention removes meanwhile, unless they are to be kept as missing."""
    findings = []
    for step in steps:
        with said(f"verifying step {step}"):
            finding = _find(verify_step, path, step, keep_missing=keep_missing)
        if finding is not None:
            findings.append(finding)
    return findings


def _find(
    ask: Callable[[Path, int], Answer], path: Path, step: int, *, keep_missing: bool = False
) -> Finding[Answer] | None:
    """Return the facts of a step, or its error; None if it was removed since it was listed."""
    try:
        return Finding(step=step, fact=ask(path, step))
    except NotFoundError as error:
        return Finding(step=step, error=error) if keep_missing else None
    except CheckpointError as error:
        return Finding(step=step, error=error)
