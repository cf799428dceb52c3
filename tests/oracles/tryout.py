"""Take cases through every door, and hold what comes out beside what torch.save and torch.load bring back.

Where torch's load_state_dict of an optimizer rounds states to the dtype of their parameters, ours are to be exact as in
the run that goes on; so they are in what is compared with. DCP may differ from torch.save: it makes text of keys,
and has every key that the target had. So our doors of DCP may be like either.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from asyncckpt.errors import CheckpointError
from tests.oracles.doors import DOORS, TORCH_DCP, TORCH_SAVE, TORCH_SAVE_EXACT, Door
from tests.oracles.runs import GROWS_AT, LOADED, SAVED, RandomLoop, RunCase, differences, image

STEPS_AFTER = 20


@dataclass(frozen=True)
class WayOutcome:
    """What came of a way. error: of the save or the load. changed: where a refused load has changed its targets.

    begun, ended: images of the loaded run, right after the load and after further steps; losses of these.
    """

    error: BaseException | None = None
    changed: tuple[str, ...] = ()
    begun: Any = None
    ended: Any = None
    losses: Any = None

    @property
    def is_refusal(self) -> bool:
        return isinstance(self.cause, CheckpointError)

    @property
    def cause(self) -> BaseException | None:
        """What DCP has wrapped, where it has."""
        if isinstance(self.error, CheckpointException):
            ((cause, _),) = self.error.failures.values()
            return cause
        return self.error

    def against(self, wanted: WayOutcome) -> list[str]:
        """Return what differs; nothing for a refusal in time that has left no trace."""
        if self.error is not None:
            if self.is_refusal:
                return list(self.changed)
            return [f"raised {type(self.cause).__name__}: {str(self.cause)[:300]}", *self.changed]
        for what in "begun", "losses", "ended":
            found = list(differences(getattr(self, what), getattr(wanted, what), what))
            if found:
                return found
        return []


def go_through(case: RunCase, door: Door, *, is_wrapped: tuple[bool, bool]) -> WayOutcome:
    """Save a run, load it into a new one, and train that."""
    saves_wrapped, loads_wrapped = (one and may for one, may in zip(is_wrapped, door.may_wrap, strict=True))
    grown = case.steps >= GROWS_AT and not door.needs_twin
    target = RandomLoop(case, LOADED, grown=grown, is_wrapped=loads_wrapped, has_form=door.needs_twin)
    if door.needs_twin:
        target.train(case.steps)
    elif case.has("change:used") and (grown or not case.has("change:grows")):
        target.train(case.steps + 2)  # It was trained before it is loaded, and for longer.
    before = None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        try:
            run = RandomLoop(case, SAVED, is_wrapped=saves_wrapped)
            early = min(door.early, case.steps)
            run.train(case.steps - early)
            with run.in_its_world():
                door.save(run, path)
            before = target.image()
            with target.in_its_world():
                door.load(path, target)
        except (Exception, CheckpointException) as error:
            changed = () if before is None else differences(target.image(), before, "changed by a refused load")
            return WayOutcome(error, tuple(changed))
    target.step, target.grown = case.steps, case.steps >= GROWS_AT
    begun = target.image()
    try:
        losses = image(target.train(STEPS_AFTER))
    except Exception as error:
        return WayOutcome(error, ("in a step after the load",))
    return WayOutcome(None, (), begun, target.image(), losses)


def uninterrupted(case: RunCase) -> WayOutcome:
    run = RandomLoop(case, SAVED)
    run.train(case.steps)
    begun = run.image()
    losses = image(run.train(STEPS_AFTER))
    return WayOutcome(None, (), begun, run.image(), losses)


@dataclass(frozen=True)
class Tried:
    """findings: by the names of doors, what differs. refused: by the names of doors, what they said."""

    findings: Mapping[str, list[str]]
    refused: Mapping[str, str]
    torch_differs: list[str]
    dcp_differs: list[str]


class NoCase(Exception):
    """Torch itself cannot make, train or load what was drawn, so there is nothing to compare with."""


def try_case(
    case: RunCase, doors: Mapping[str, Door] = DOORS, *, is_wrapped: tuple[bool, bool] = (True, True)
) -> Tried:
    plain = (False, False)
    try:
        wanted = go_through(case, TORCH_SAVE_EXACT, is_wrapped=plain)
    except Exception as error:
        raise NoCase(f"torch does not train it: {case}") from error
    if wanted.error is not None:
        raise NoCase(f"torch.save's own way fails: {case}") from wanted.error
    try:
        for wrapped in set(is_wrapped):
            RandomLoop(case, SAVED, is_wrapped=wrapped)
    except Exception as error:
        raise NoCase(f"torch does not wrap it: {case}") from error
    findings, refused = {}, {}
    by_dcp = go_through(case, TORCH_DCP, is_wrapped=plain)
    for name, door in doors.items():
        outcome = go_through(case, door, is_wrapped=is_wrapped)
        found = outcome.against(wanted)
        if door.needs_twin and by_dcp.error is not None and outcome.error is not None:
            continue  # DCP cannot do it either.
        if found and door.needs_twin and by_dcp.error is None:
            found = outcome.against(by_dcp)
        if found:
            findings[name] = found
        elif outcome.error is not None:
            refused[name] = str(outcome.cause)[:300]
    by_torch = go_through(case, TORCH_SAVE, is_wrapped=plain)
    return Tried(findings, refused, by_torch.against(wanted), by_dcp.against(wanted))


def smaller(case: RunCase, door: str, **how: Any) -> RunCase:
    """Take away pieces of a case as long as a door still differs."""
    pieces = list(case.pieces)
    for piece in case.pieces:
        fewer = RunCase(tuple(one for one in pieces if one != piece), case.steps)
        try:
            if try_case(fewer, {door: DOORS[door]}, **how).findings:
                pieces.remove(piece)
        except Exception:
            continue
    return RunCase(tuple(pieces), case.steps)


torch.set_num_threads(1)
