"""Three processes none of whose locks work: one saves, two remove old checkpoints. What is acknowledged can be read.

The one that saves commits a delta of a step that the others remove, then that step anew, and a delta of the new one.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import asyncckpt
from asyncckpt.commit import transaction
from asyncckpt.commit.attempt import Claim, Draft
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.commit.transaction import Transaction
from asyncckpt.engine.process.background import background
from asyncckpt.engine.process.held_directory import held_directory
from asyncckpt.format.names import Attempt
from asyncckpt.storage.directory import Directory
from tests.chains.model import layer_of
from tests.chains.written import Written, write
from tests.end_to_end.turns import Turns

OLD, NEWER = 3, (5, 6)
LAYER = {"user": layer_of({})}


class World:
    """A directory with an old and a newer checkpoint, and what process 0 commits to it, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._template, self._path = folder / "template", folder / "root"
        old, *_ = (write(self._template, step, LAYER) for step in (OLD, *NEWER))
        anew = write(folder / "anew", OLD, LAYER)
        self._saves = [
            write(folder / "delta", 7, LAYER, parents=old.chain),
            anew,
            write(folder / "delta of the new one", 8, LAYER, parents=anew.chain),
        ]

    def run(self, *turns: tuple[int, float]) -> list[list[str]]:
        """Check that what is acknowledged can be read, if it is there; return the operations of each process."""
        shutil.rmtree(self._path, ignore_errors=True)
        shutil.copytree(self._template, self._path)
        schedule = Turns(self._path, turns, keep=2, sweeps=False)
        acknowledged = []
        with schedule.taken():
            for made in self._saves:
                try:
                    self._commit(made)
                    acknowledged.append(made.head.step)
                except asyncckpt.CheckpointError:
                    pass
        for step in asyncckpt.list_steps(self._path):
            if step in acknowledged:
                asyncckpt.verify(self._path, step)
        return schedule.made

    def _commit(self, made: Written) -> None:
        with CheckpointRoot.for_writing(self._path) as root, held_directory(root, "fsync") as commits:
            claim = Claim(root.root.identity, "save", Attempt(step=made.head.step, id=made.head.attempt))
            with Transaction.begin(commits, claim) as begun:
                assert isinstance(begun.place, Directory)
                for path in made.folder.iterdir():
                    fd, _ = begun.place.create_file(path.name)
                    os.write(fd, path.read_bytes())
                    os.close(fd)
                draft = Draft(made.head, made.body, made.digests)
                background.run(lambda: begun.commit(draft), "a test")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def stops(world: World) -> tuple[int, int, int]:
    """How many operations process 0 makes before it publishes, until it is acknowledged, and until the next one."""
    made = world.run()[0]
    first, second = (at for at, name in enumerate(made) if name == "publish")
    return first, made.index("exists", first), second


def schedules(world: World) -> Iterator[list[tuple[int, float]]]:
    """Process 0 stands before it publishes, while the others go on a bit; then one of them does so once more."""
    first, *later = stops(world)
    bits = range(len(world.run((1, math.inf))[1]))
    for one, again, at in itertools.product(bits, bits, later):
        yield [(0, first), (1, one), (0, at - first), (1, again), (0, math.inf)]
        for other in bits:
            yield [(0, first), (1, one), (2, other), (0, at - first), (2, again), (1, math.inf)]


@pytest.mark.parametrize("every", [499, pytest.param(11, marks=pytest.mark.slow)])
def test_what_is_acknowledged_can_be_read_whatever_two_others_remove(every: int, world: World) -> None:
    for turns in itertools.islice(schedules(world), 0, None, every):
        world.run(*turns)


def test_without_its_look_for_marks_a_delta_loses_its_parent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = world.run((1, math.inf))[1].index("move")
    monkeypatch.setattr(transaction, "being_removed", lambda _: set())
    first, acknowledged, _ = stops(world)
    with pytest.raises(asyncckpt.CorruptError, match="its parent step 3"):
        world.run((0, first), (1, looked), (0, acknowledged - first), (1, math.inf))
