"""Every file operation of a save and a load fails in every way it can: an error of the library, and nothing is lost."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from fault_runs import BatchReport, disturb_loads, disturb_saves
from fork_lanes import ForkLanes, Lane
from scenarios import SCENARIOS, Scenario
from shim import STICKY_KINDS, Action, DiskFault
from templates import Templates

from asyncckpt.native import implementation

ALL = STICKY_KINDS[errno.EIO]
EVERY_FAULT = [
    *(DiskFault(Action.FAIL, at=0, error=error) for error in STICKY_KINDS),
    *(DiskFault(Action.FAIL, at=0, error=error, sticky=kinds) for error, kinds in STICKY_KINDS.items()),
    # Once only: CPython tries again for as long as it lasts (PEP 475).
    DiskFault(Action.FAIL, at=0, error=errno.EINTR),
    DiskFault(Action.LIE, at=0, error=errno.EIO),
    DiskFault(Action.LIE, at=0, error=errno.EIO, sticky=ALL),
    DiskFault(Action.SHORT, at=0),
    DiskFault(Action.SHORT, at=0, sticky=ALL),
    DiskFault(Action.ZERO, at=0),
    DiskFault(Action.ZERO, at=0, sticky=ALL),
]
# One of each kind: an error that passes or stays, no space, a file system that is read-only, and a refusal to one call.
SINGLE_ERRORS, LASTING_ERRORS = {errno.EIO, errno.EACCES}, {errno.EIO, errno.ENOSPC, errno.EROFS}
EVERY_KIND = [
    fault
    for fault in EVERY_FAULT
    if fault.action is not Action.FAIL
    or fault.error == errno.EINTR
    or fault.error in (LASTING_ERRORS if fault.sticky else SINGLE_ERRORS)
]
# What the paths through the library can tell apart.
TELLING_FAULTS = [
    DiskFault(Action.FAIL, at=0, error=errno.EIO),
    DiskFault(Action.FAIL, at=0, error=errno.EIO, sticky=ALL),
    DiskFault(Action.FAIL, at=0, error=errno.ENOSPC, sticky=STICKY_KINDS[errno.ENOSPC]),
    DiskFault(Action.LIE, at=0, error=errno.EIO),
    DiskFault(Action.SHORT, at=0, sticky=ALL),
]
FULLY_DISTURBED = "async"
OTHERS = [name for name in SCENARIOS if name != FULLY_DISTURBED]
# These write in another way; the others differ in what they rely on, and some make a chain first in every run.
WRITE_OTHERWISE = ["blocking", "left-open"]
RELY_FAULTS = [DiskFault(Action.FAIL, at=0, error=errno.EIO)]
# The twin makes the same operations from Python; these are the ways in which it can write.
DISTURBED = OTHERS if implementation == "native" else [*WRITE_OTHERWISE, "delta"]
FAULTS = EVERY_KIND if implementation == "native" else TELLING_FAULTS


def test_every_operation_of_a_save_may_fail_in_every_kind_of_way(
    lanes: ForkLanes, templates: Templates, run_folders: Iterator[Path]
) -> None:
    disturb(SCENARIOS[FULLY_DISTURBED], FAULTS, lanes, templates, run_folders)


@pytest.mark.parametrize("name", DISTURBED)
def test_operations_of_other_saves_may_fail(
    name: str, lanes: ForkLanes, templates: Templates, run_folders: Iterator[Path]
) -> None:
    faults, every = (TELLING_FAULTS, 2) if name in WRITE_OTHERWISE else (RELY_FAULTS, 3)
    disturb(SCENARIOS[name], faults, lanes, templates, run_folders, every=every)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_operation_of_all_saves_may_fail_in_every_way(
    name: str, lanes: ForkLanes, templates: Templates, run_folders: Iterator[Path]
) -> None:
    disturb(SCENARIOS[name], EVERY_FAULT, lanes, templates, run_folders)


def disturb(
    scenario: Scenario,
    faults: list[DiskFault],
    lanes: ForkLanes,
    templates: Templates,
    folders: Iterator[Path],
    *,
    every: int = 1,
) -> None:
    """every: of the operations of each kind, one of so many (tests/shares.py)."""
    template = templates.of(scenario)
    show(
        lanes.run_all((fault.name, partial(batch, scenario, next(folders), template, fault, every)) for fault in faults)
    )


def test_every_operation_of_a_load_may_fail_in_every_way(
    lanes: ForkLanes, templates: Templates, run_folders: Iterator[Path]
) -> None:
    template = templates.of(SCENARIOS["async"])
    faults = EVERY_FAULT if implementation == "native" else TELLING_FAULTS
    show(lanes.run_all((fault.name, partial(load_batch, next(run_folders), template, fault)) for fault in faults))


def batch(scenario: Scenario, folder: Path, template: Path, fault: DiskFault, every: int, lane: Lane) -> BatchReport:
    [report] = lane.messages(disturb_saves, scenario, folder, template, fault, every)
    return checked(report)


def load_batch(folder: Path, template: Path, fault: DiskFault, lane: Lane) -> BatchReport:
    [report] = lane.messages(disturb_loads, folder, template, fault)
    return checked(report)


def checked(report: object) -> BatchReport:
    assert isinstance(report, BatchReport)
    assert not report.wrong, "\n".join(report.wrong)
    return report


def show(reports: list[BatchReport]) -> None:
    outcomes = sum((report.outcomes for report in reports), Counter[str]())
    assert outcomes.total() > 0
    print(f"{outcomes.total()} faults: {dict(outcomes)}")
