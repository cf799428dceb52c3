"""Random training, saves, failures, compaction and retention: every step that is there is what was saved.

50 runs of up to 50 steps on the compiled core, 200 by `make test-slow`, fewer on the twin, which tests the same Python.
They are the same each time; `make test-random` makes others, and more. What the runs do is in saves_world.py and
table_world.py. That they can fail is shown at the end: with a table that forgets one kind of mark a delta or a
refreshed snapshot keeps an old row, and some run finds it.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from asyncckpt import CorruptError
from asyncckpt.model.table import CutVersion
from asyncckpt.native import implementation
from asyncckpt.tables.touched_rows import TouchedRows
from tests.deltas.saves_world import SavesWorld

pytestmark = pytest.mark.usefixtures("one_thread")

IDS_COUNT = 12
LANES = 8  # So that processes can share the runs.
RUNS_PER_LANE = 25 if implementation == "native" else 7
CONTROL_RUNS = 125
STEPS_COUNT = 50
MEMORY_FILE_SYSTEM = "/dev/shm"

NAMES = st.sampled_from(["plain", "levels"])
KINDS = st.sampled_from(["auto", "auto", "full", "delta", "delta"])
# A set of ids as the bits of one number: one draw, and less bits are simpler.
IDS = st.integers(1, 2**IDS_COUNT - 1).map(lambda bits: [id for id in range(IDS_COUNT) if bits >> id & 1])


class SavesMachine(RuleBasedStateMachine):
    """One run."""

    def __init__(self) -> None:
        super().__init__()
        parent = MEMORY_FILE_SYSTEM if Path(MEMORY_FILE_SYSTEM).is_dir() else None
        self.folder = Path(tempfile.mkdtemp(prefix="asyncckpt-deltas-", dir=parent))
        self.world = SavesWorld(self.folder / "checkpoints")

    def teardown(self) -> None:
        try:
            self.world.check_all()
        finally:
            self.world.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    # -- training ------------------------------------------------------------------------------------------------

    @rule(name=NAMES, ids=IDS)
    def insert(self, name: str, ids: list[int]) -> None:
        self.world.worlds[name].insert(ids)

    @rule(name=NAMES, ids=IDS)
    def insert_embeddings(self, name: str, ids: list[int]) -> None:
        self.world.worlds[name].insert_embeddings(ids)

    @rule(name=NAMES, ids=IDS)
    def look_up(self, name: str, ids: list[int]) -> None:
        self.world.worlds[name].look_up(ids)

    @rule(name=NAMES, ids=IDS)
    def train(self, name: str, ids: list[int]) -> None:
        self.world.worlds[name].train(ids)

    @rule(name=NAMES, ids=IDS)
    def find_and_touch(self, name: str, ids: list[int]) -> None:
        self.world.worlds[name].find_and_touch(ids)

    @rule(name=NAMES, ids=IDS)
    def see(self, name: str, ids: list[int]) -> None:
        self.world.worlds[name].see(ids)

    @rule(name=NAMES, ids=IDS)
    def remove(self, name: str, ids: list[int]) -> None:
        self.world.worlds[name].remove(ids)

    @rule(name=NAMES, age=st.integers(0, 40))
    def evict(self, name: str, age: int) -> None:
        world = self.world.worlds[name]
        world.evict(below=world.number - age)

    @rule(name=NAMES, ids=IDS)
    def write_in_place(self, name: str, ids: list[int]) -> None:
        self.world.worlds[name].write_in_place(ids)

    @rule(name=NAMES)
    def grow(self, name: str) -> None:
        self.world.worlds[name].grow()

    @rule(name=NAMES)
    def clear(self, name: str) -> None:
        self.world.worlds[name].clear()

    # -- saves ---------------------------------------------------------------------------------------------------

    @rule(kind=KINDS, meanwhile=IDS)
    def save_async(self, kind: str, meanwhile: list[int]) -> None:
        self.world.save(kind, meanwhile=meanwhile)

    @rule(kind=KINDS)
    def save(self, kind: str) -> None:
        self.world.save(kind, blocking=True)

    @rule(kind=KINDS, at=st.integers(0, 10))
    def fail(self, kind: str, at: int) -> None:
        self.world.fail(kind, at=at)

    @rule(kind=KINDS)
    def cancel(self, kind: str) -> None:
        self.world.cancel(kind)

    @precondition(lambda self: self.world.committed)
    @rule(choice=st.integers(0, 100))
    def load(self, choice: int) -> None:
        self.world.check_step(self._step(choice))

    @precondition(lambda self: self.world.committed)
    @rule(choice=st.integers(0, 100))
    def load_live(self, choice: int) -> None:
        self.world.load_live(self._step(choice))

    @precondition(lambda self: self.world.committed)
    @rule(choice=st.integers(0, 100), offline=st.booleans())
    def compact(self, choice: int, offline: bool) -> None:
        self.world.compact(self._step(choice), offline=offline)

    @rule(
        keep=st.sampled_from([None, 1, 2, 3]),
        host_level=st.sampled_from(["copy", "first_touch"]),
        refresh=st.booleans(),
        filters=st.sampled_from([(), (), ("odd",), ("zeros",), ("odd", "zeros")]),
    )
    def reopen(self, keep: int | None, host_level: str, refresh: bool, filters: tuple[str, ...]) -> None:
        self.world.close()
        self.world.open(keep=keep, host_level=host_level, refresh=refresh, filters=filters)

    def _step(self, choice: int) -> int:
        steps = self.world.steps()
        return steps[choice % len(steps)]


def run_machine(runs_count: int, *, lane_seed: int, **options: Any) -> None:
    run_state_machine_as_test(
        seed(lane_seed)(type("SavesOfLane", (SavesMachine,), {})),
        settings=settings(
            deadline=None,
            max_examples=runs_count,
            stateful_step_count=STEPS_COUNT,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
            database=None,
            **options,
        ),
    )


@pytest.mark.random
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:cache of table")
@pytest.mark.parametrize("lane", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, LANES))])
def test_every_step_is_what_was_saved(lane: int, base_seed: int, runs_factor: int) -> None:
    run_machine(runs_factor * RUNS_PER_LANE, lane_seed=base_seed + lane)


@pytest.mark.random
@pytest.mark.filterwarnings("ignore:cache of table")
def test_a_forgotten_mark_is_found(monkeypatch: pytest.MonkeyPatch, base_seed: int) -> None:
    """Otherwise the runs above would show nothing: each cut forgets the last of the rows written since another one.

    A row that keeps its old values is not what was saved; one that keeps an id which stands elsewhere by now makes the
    table hold that id twice.
    """
    plain = TouchedRows.touched_since

    def forgetful(self: TouchedRows, version: CutVersion) -> Any:
        rows = plain(self, version)
        return rows if rows is None else rows[:-1]

    monkeypatch.setattr(TouchedRows, "touched_since", forgetful)
    with pytest.raises((AssertionError, CorruptError), match=r"is not what was saved|holds the same id twice"):
        run_machine(CONTROL_RUNS, lane_seed=base_seed, phases=[Phase.generate], report_multiple_bugs=False)
