"""A delta that fails loses no mark: the next one holds all that was written since the checkpoint it builds upon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deltas.failing_storage import counted
from tests.deltas.saves_world import SavesWorld

FIRST, SECOND, THIRD = range(0, 6), range(4, 9), range(7, 12)
OPERATIONS_MAX = 20


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SavesWorld]:
    """Twelve rows and a full checkpoint of them."""
    world = SavesWorld(tmp_path / "checkpoints")
    for table in world.worlds.values():
        table.insert(range(12))
    world.save("full")
    yield world
    world.close()


def change(world: SavesWorld, ids: range) -> None:
    """Every way to change rows: updates, a removal, and a row that comes back."""
    for table in world.worlds.values():
        table.train(ids)
        table.remove([ids[0]])
        table.look_up([ids[0] - 1 if ids[0] else 11])
        table.find_and_touch([ids[1]])


def test_a_delta_makes_operations_that_can_fail(world: SavesWorld) -> None:
    change(world, FIRST)
    with counted() as storage:
        world.save("delta")
    assert {"make_folder", "create_file", "sync", "publish"} == set(storage.operations)
    assert len(storage.operations) <= OPERATIONS_MAX


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("at", range(OPERATIONS_MAX))
def test_failure_at_any_operation_loses_no_mark(at: int, blocking: bool, world: SavesWorld) -> None:
    change(world, FIRST)
    world.fail("delta", at=at)
    change(world, SECOND)
    world.save("delta" if world.has_base else "full", blocking=blocking)
    change(world, THIRD)
    world.save("delta")
    world.check_all()


def test_failure_after_failure_loses_no_mark(world: SavesWorld) -> None:
    """Marks of several failed saves add up; a cancelled one among them."""
    for at, ids in enumerate((FIRST, SECOND, THIRD)):
        change(world, ids)
        world.fail("delta", at=at)
        change(world, ids)
        world.cancel("delta")
    world.save("delta")
    world.check_all()


def test_rows_of_a_failed_full_save_are_in_the_next_delta(world: SavesWorld) -> None:
    change(world, FIRST)
    world.fail("full", at=0)
    change(world, SECOND)
    world.save("delta")
    assert world.kinds == ["full", "delta"]
    world.check_all()


def test_a_skipped_save_loses_no_mark(world: SavesWorld) -> None:
    change(world, FIRST)
    world.save_while_busy("delta", on_meanwhile=lambda: change(world, SECOND))
    world.save("delta")
    world.check_all()
