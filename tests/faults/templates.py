"""Directories with the checkpoints that a scenario finds; made once, copied for every run."""

from __future__ import annotations

from pathlib import Path

from child_runs import prepare, save_once
from fork_lanes import ForkLanes
from op_log import read_log
from scenarios import Scenario
from shim import NOTHING, Action, DiskFault, OpKind


class Templates:
    """Makes templates in `folder` when they are first asked for."""

    def __init__(self, lanes: ForkLanes, folder: Path) -> None:
        self._lanes = lanes
        self._folder = folder

    def of(self, scenario: Scenario) -> Path:
        template = self._folder / scenario.name
        if not template.exists():
            self._make(scenario, template)
        return template

    def _make(self, scenario: Scenario, template: Path) -> None:
        plain = template.with_name(f"{scenario.name}-plain") if scenario.leftovers else template
        plain.mkdir()
        self._lanes.run(lambda lane: lane.messages(prepare, scenario, plain))
        if scenario.leftovers:
            self._kill_a_save(scenario, plain, template)

    def _kill_a_save(self, scenario: Scenario, plain: Path, template: Path) -> None:
        """Leave behind what a save leaves that is killed just before its commit: that is the most."""
        trial = template.with_name(f"{scenario.name}-trial")
        self._lanes.run(lambda lane: lane.messages(save_once, scenario, trial, plain, NOTHING))
        commit = next(o.number for o in read_log(Path(f"{trial}.log")) if o.kind is OpKind.RENAME)
        fault = DiskFault(Action.KILL_BEFORE, at=commit)
        self._lanes.run(lambda lane: lane.call(save_once, scenario, template, plain, fault))
        assert list(template.glob("*/manifests/.m-*")), "the killed save left no unpublished manifest"
