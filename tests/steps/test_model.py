"""Random trainings beside a model: each save holds what was there at its call, or is refused for what has changed it.

A save that commits holds the copies of the model, bit for bit. One is refused only where something else than a step has
written, and names that. Steps, and all else that a trainer does, see no error. In the end the wait and the comparisons
are taken away, which every round finds.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import fsdp

from asyncckpt.devices import step_copies
from asyncckpt.devices.step_copies import Chunk, StepCopies
from asyncckpt.devices.watches import Watch
from asyncckpt.engine.features import steps
from asyncckpt.engine.features.steps import StepFences
from asyncckpt.engine.save import save_job
from tests.shares import slow_but_for_a_share
from tests.steps import gate as gates
from tests.steps.trainer import SavingTrainer
from tests.steps.trainings import RandomTraining
from tests.worlds.gates import nothing

pytestmark = pytest.mark.any_core

HAS_FSDP2 = hasattr(fsdp, "fully_shard")
SEEDS_COUNT = 60
ROUND_COUNT = 30
LARGE_SCALE = 100
# What has to happen while memory of a save is open, in a hundred programs.
HAPPENING = (
    "write", "load_module", "load_optimizer", "memory exchanged", "swap", "replace", "add_group", "train_a_stranger",
    "train_and_signal", "forward_and_signal", "saved within a step", "wait_staged",
)  # fmt: skip


class Seams:
    """Where the model looks into the background, and into steps that wait. trainer: of which program."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mesh: Any) -> None:
        self.monkeypatch, self.mesh = monkeypatch, mesh
        self.trainer: SavingTrainer | None = None
        self.counts: Counter[str] = Counter()
        monkeypatch.setattr(save_job, "WRITE_S_MAX", 0.05)  # Nothing that this thread writes takes longer.
        self.gates = [gates.install_before(monkeypatch), gates.install(monkeypatch)]
        wait, copy_chunk = StepCopies._wait_copied, Chunk.copy

        def waiting(steps: StepCopies, parts: Any, **options: Any) -> bool:
            self._tell()
            return wait(steps, parts, **options)

        def copying(chunk: Chunk, *, threads: int) -> None:
            copy_chunk(chunk, threads=threads)
            self._tell(is_copying=True)

        monkeypatch.setattr(StepCopies, "_wait_copied", waiting)
        monkeypatch.setattr(Chunk, "copy", copying)

    def _tell(self, *, is_copying: bool = False) -> None:
        if self.trainer is not None and threading.current_thread() is threading.main_thread():
            self.trainer.waits(is_copying=is_copying)

    def wrong(self, seed: int, path: Path) -> list[str]:
        """Run a program; return what the model finds."""
        scale = LARGE_SCALE if seed % 20 == 9 else 1  # So that it takes a while to copy.
        gates.watch_short(self.monkeypatch, bytes_min=(1, 1, 100)[seed % 3])
        self.monkeypatch.setattr(step_copies, "CHUNK_BYTES", (300, 700, 5000, 1 << 20)[seed % 4] * scale)
        kind = {3: "DTensors", 6: "sharded" if HAS_FSDP2 else "DTensors"}.get(seed % 8)
        training = RandomTraining(seed, self.mesh if kind else None, is_sharded=kind == "sharded", scale=scale)
        self.trainer = trainer = SavingTrainer(training, path, self.gates, self.counts)
        try:
            with trainer.running():
                trainer.run()
                return trainer.check()
        finally:
            print(seed, kind, trainer.log)
            self.trainer = None


@pytest.fixture
def seams(monkeypatch: pytest.MonkeyPatch, mesh: Any) -> Iterator[Seams]:
    made = Seams(monkeypatch, mesh)
    yield made
    for gate in made.gates:
        gate.open()


@pytest.mark.random
@pytest.mark.parametrize("seed", slow_but_for_a_share(range(SEEDS_COUNT), "models of steps", every=6))
def test_saves_are_as_the_model_says(seed: int, tmp_path: Path, seams: Seams, base_seed: int) -> None:
    assert seams.wrong(base_seed + seed, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(10))
def test_saves_of_many_programs_are_as_the_model_says(hundred: int, tmp_path: Path, seams: Seams) -> None:
    for seed in range(1000 + 100 * hundred, 1100 + 100 * hundred):
        assert seams.wrong(seed, tmp_path / str(seed)) == [], seed
    assert seams.counts["committed"] > 4 * seams.counts["refused"] > 80
    assert min(seams.counts[name] for name in HAPPENING) > 0


@pytest.mark.parametrize("round", range(5))
@pytest.mark.parametrize(
    ("owner", "name"),
    [(StepFences, "before_step"), (Watch, "check_unchanged"), (steps, "is_stepping")],
    ids=["steps do not wait", "versions are not compared", "steps are not known to run"],
)
def test_what_is_left_out_is_found(
    owner: object, name: str, round: int, tmp_path: Path, seams: Seams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, nothing)
    seeds = range(round * ROUND_COUNT, (round + 1) * ROUND_COUNT)
    assert any(is_wrong(seams, seed, tmp_path / str(seed)) for seed in seeds)


def is_wrong(seams: Seams, seed: int, path: Path) -> bool:
    try:
        return seams.wrong(seed, path) != []
    except Exception:
        return True
