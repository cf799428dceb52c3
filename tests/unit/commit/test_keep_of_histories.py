"""Random histories beside a model: what retention leaves is what rules, pins and deltas need, it loads, and is all."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import asyncckpt
from asyncckpt import KeepPolicy, UsageError
from asyncckpt.checkpoints import pin, pinned_steps, prune, remove, remove_after, unpin
from asyncckpt.format.head import CREATED_FORMAT
from tests.chains.model import DIM, Rows, layer_of, load
from tests.chains.written import Written, write

EXAMPLES_COUNT = 40


@dataclass
class Saved:
    """One checkpoint of the model; hour: of its commit."""

    written: Written
    rows: Rows
    parents: tuple[int, ...]
    hour: int
    loss: float | None
    pinned: bool = False
    compacted: bool = False
    verified: bool = False


@dataclass
class History:
    root: Path
    hour: int = 1
    step: int = 0
    saved: dict[int, Saved] = field(default_factory=dict)

    # -- what happens --------------------------------------------------------------------------------------------------

    def save(self, *, is_delta: bool, steps: int, hours: int, loss: float | None) -> None:
        base = self.saved[max(self.saved)] if is_delta and self.saved else None
        self.step, self.hour = self.step + steps, max(0, self.hour + hours)
        own = {self.step: (float(self.step),) * (DIM + 1)}
        chain = () if base is None else base.written.chain
        written = write(
            self.root,
            self.step,
            {"user": layer_of(own)},
            parents=chain,
            created=time.strftime(CREATED_FORMAT, time.gmtime(self.hour * 3600)),
            metadata={} if loss is None else {"loss": loss, "note": "x"},
        )
        rows = own if base is None else {**base.rows, **own}
        parents = tuple(parent.step for parent in chain)
        self.saved[self.step] = Saved(written, rows, parents, self.hour, loss)

    def compact(self, choice: int) -> None:
        step = self.choose(choice)
        if self.saved[step].parents and not self.saved[step].compacted:
            asyncckpt.compact(self.root, step)
            self.saved[step].compacted = True

    def pin(self, choice: int) -> None:
        step = self.choose(choice)
        was_pinned = self.saved[step].pinned
        if was_pinned:
            assert unpin(self.root, step)
        else:
            pin(self.root, step)
        self.saved[step].pinned = not was_pinned

    def prune(self, policy: KeepPolicy) -> None:
        if policy.best is not None and all(saved.loss is None for saved in self.saved.values()):
            with pytest.raises(UsageError, match="no checkpoint has the metric"):
                prune(self.root, policy)
            self.check(self.saved.keys())
            return
        stay = {above for step in self.wanted(policy) for above in (step, *self.needed_by(step))}
        planned = prune(self.root, policy, dry_run=True)
        assert asyncckpt.list_steps(self.root) == list(self.saved)
        done = prune(self.root, policy)
        assert planned == done
        assert list(done.removed) == sorted(self.saved.keys() - stay)
        assert done.kept.keys() == stay
        assert all(done.kept.values())
        self.check(stay)

    def remove(self, choices: list[int]) -> None:
        going = {self.choose(choice) for choice in choices}
        stay = self.saved.keys() - going
        if any(self.saved[step].pinned for step in going) or any(going & {*self.needed_by(step)} for step in stay):
            try:
                remove(self.root, going)
            except UsageError:
                return
            raise AssertionError(f"{going} were removed")
        assert remove(self.root, going) == sorted(going)
        self.check(stay)

    def verify(self, choice: int) -> None:
        step = self.choose(choice)
        asyncckpt.verify(self.root, step)
        self.saved[step].verified = True

    def empty(self) -> None:
        """Somebody begins anew in the same directory."""
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.saved, self.step = {}, 0

    def go_back(self, choice: int) -> None:
        step = self.choose(choice)
        going = sorted(above for above in self.saved if above > step)
        assert remove_after(self.root, step, even_pinned=True) == going
        self.check(self.saved.keys() - set(going))
        self.step = step

    # -- the model -----------------------------------------------------------------------------------------------------

    def choose(self, choice: int) -> int:
        return sorted(self.saved)[choice % len(self.saved)]

    def wanted(self, policy: KeepPolicy) -> set[int]:
        steps = sorted(self.saved)
        wanted = {*steps[-policy.latest :], *(step for step in steps if self.saved[step].pinned)}
        wanted |= {*[step for step in steps if self.saved[step].verified][-1:]}
        if policy.every_steps is not None:
            wanted |= {*{step // policy.every_steps: step for step in reversed(steps)}.values()}
        last = None
        for step in steps if policy.every_hours is not None else ():
            if self.saved[step].hour // policy.every_hours != last:
                wanted.add(step)
                last = self.saved[step].hour // policy.every_hours
        losses = [(self.saved[step].loss, step) for step in steps]
        known = [
            (loss if policy.mode == "min" else -loss, s) for loss, s in losses if loss is not None and loss == loss
        ]
        return wanted | {step for _, step in sorted(known)[: policy.best or 0]}

    def needed_by(self, step: int) -> Iterator[int]:
        for parent in () if self.saved[step].compacted else self.saved[step].parents:
            yield parent
            if self.saved[parent].compacted:
                return

    def check(self, stay: Any) -> None:
        """These are there, load as what was saved, and nothing else is there."""
        self.saved = {step: self.saved[step] for step in sorted(stay)}
        assert asyncckpt.list_steps(self.root) == list(self.saved)
        assert pinned_steps(self.root) == [step for step, saved in self.saved.items() if saved.pinned]
        for step, saved in self.saved.items():
            assert load(self.root, step, verify=False) == saved.rows


def check_nothing_else(history: History) -> None:
    """A last prune takes also the own checkpoints of compacted steps."""
    history.prune(KeepPolicy(latest=1000))
    folders = {path.name for path in (history.root / "data").iterdir()}
    assert len(folders) == len(history.saved)
    assert {name.name for name in (history.root / "manifests").iterdir()} == {
        *(f"{step:012d}{'.full' if saved.compacted else ''}.json" for step, saved in history.saved.items()),
        *(f"{step:012d}.pin" for step, saved in history.saved.items() if saved.pinned),
    }


POLICIES = st.builds(
    lambda latest, every_steps, every_hours, best, mode: KeepPolicy(
        latest, every_steps, every_hours, best, None if best is None else "loss", mode
    ),
    st.integers(1, 3),
    st.none() | st.integers(1, 12),
    st.none() | st.sampled_from([1, 2, 0.5, 7.5]),
    st.none() | st.integers(1, 3),
    st.sampled_from(["min", "max"]),
)
SAVES = st.fixed_dictionaries(
    {
        "is_delta": st.booleans(),
        "steps": st.integers(1, 6),
        "hours": st.sampled_from([0, 0, 1, 1, 2, 300, -300, -3]),  # Clocks jump.
        "loss": st.none() | st.sampled_from([1.5, -2.0, 3.0, 0.0, math.nan, math.inf, -math.inf]),
    }
)
CHOICES = st.integers(0, 99)
EVENTS = st.lists(
    st.one_of(
        SAVES.map(lambda save: ("save", save)),
        SAVES.map(lambda save: ("save", save)),
        POLICIES.map(lambda policy: ("prune", {"policy": policy})),
        CHOICES.map(lambda choice: ("pin", {"choice": choice})),
        CHOICES.map(lambda choice: ("compact", {"choice": choice})),
        CHOICES.map(lambda choice: ("verify", {"choice": choice})),
        st.just(("empty", dict[str, Any]())),
        CHOICES.map(lambda choice: ("go_back", {"choice": choice})),
        st.lists(CHOICES, max_size=3).map(lambda choices: ("remove", {"choices": choices})),
    ),
    max_size=14,
)


@settings(max_examples=EXAMPLES_COUNT, deadline=None, suppress_health_check=list(HealthCheck))
@given(first=st.lists(SAVES, min_size=3, max_size=8), events=EVENTS, last=POLICIES)
def test_what_is_kept(first: list[dict[str, Any]], events: list[tuple[str, dict[str, Any]]], last: KeepPolicy) -> None:
    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder))
        for save in first:
            history.save(**save)
        for name, arguments in events:
            if history.saved or name == "save":
                getattr(history, name)(**arguments)
        if history.saved:
            history.prune(last)
            check_nothing_else(history)
