"""Saves of several ranks in the earlier form: loaded by any number of ranks, and only when all ranks have them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.embcache import Saver
from tests.embcache.earlier_form import rank_folder, save_rank
from tests.embcache.models import IDS, CachedNet, Image, image, load_ranks, union
from tests.worlds.directories import flip_byte

CorruptError, NotFoundError = asyncckpt.CorruptError, asyncckpt.NotFoundError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sparse"


def nets(world_size: int, *, steps: range = range(0)) -> list[CachedNet]:
    return [CachedNet(shard=(rank, world_size), admit_after=2).trained(steps) for rank in range(world_size)]


def save(ranks: list[CachedNet], path: Path, *, step: int, save_id: str = "one") -> Image:
    for net in ranks:
        save_rank(net, path, step=step, save_id=save_id)
    return union(image(net) for net in ranks)


def load(path: Path, world_size: int, *, step: int | None = None) -> Image:
    return load_ranks(nets(world_size, steps=range(20, 23)), path, step=step)


def test_one_to_three_to_two_ranks_bit_for_bit(path: Path) -> None:
    one = nets(1, steps=range(30))
    before = save(one, path, step=0)
    assert {-(2**63), -1, 2**63 - 1} <= before["user"].keys() <= set(IDS.tolist())
    assert load(path, 3) == before
    three = nets(3)
    for net in three:
        with Saver(rank=net.shard[0], world_size=3) as saver:
            saver.load(net, path)
        net.trained(range(30, 33))
    after = save(three, path, step=1)
    assert after != before
    assert load(path, 2) == after
    assert load(path, 1) == after
    assert load(path, 1, step=0) == before  # The earlier one is still there.


@pytest.mark.parametrize("world_size", [2, 4, 5])
def test_any_number_of_ranks(path: Path, world_size: int) -> None:
    before = save(nets(world_size, steps=range(6)), path, step=3)
    for count in (1, 2, 3, 7):
        assert load(path, count) == before


def test_saves_go_on_behind_the_earlier_form(path: Path) -> None:
    """The next step is one more than the newest one that any rank has; both forms load, also the older one."""
    before = save(nets(3, steps=range(2)), path, step=41)
    save(nets(3, steps=range(1))[2:], path, step=43)
    net = nets(1, steps=range(4))[0]
    with Saver(rank=0, on_busy="queue", keep=2) as saver:
        for step in (41, 43):
            with pytest.raises(asyncckpt.ConflictError, match=f"step {step} already exists"):
                saver.save(net, path, step=step)
        assert [future.result(60).step for future in [saver.save_async(net, path) for _ in range(3)]] == [44, 45, 46]
        report = saver.load(nets(1)[0], path)
        assert (report.step, report.world_size, report.passed_over) == (46, 1, ())
    assert asyncckpt.list_steps(path) == [45, 46]  # What the earlier form left is not touched.
    assert load(path, 2) == image(net)
    assert load(path, 2, step=41) == before


# -- incomplete saves --------------------------------------------------------------------------------------------------


def test_step_that_not_all_ranks_have_is_passed_over(path: Path) -> None:
    before = save(nets(2, steps=range(3)), path, step=1)
    save(nets(2, steps=range(5))[:1], path, step=2)
    assert load(path, 1) == before
    with Saver(rank=0) as saver:
        report = saver.load(nets(1)[0], path)
        assert (report.step, report.passed_over, report.world_size) == (1, (2,), 2)
        with pytest.raises(NotFoundError, match=r"step 2 in .* is not complete, found .*\[1, 2\].*\[1\]"):
            saver.load(nets(1)[0], path, step=2)


def test_step_of_two_different_saves_is_passed_over(path: Path) -> None:
    """Both ranks have step 2, but each of another attempt."""
    before = save(nets(2, steps=range(3)), path, step=1)
    save(nets(2, steps=range(5))[:1], path, step=2, save_id="first")
    save(nets(2, steps=range(6))[1:], path, step=2, save_id="second")
    assert load(path, 2) == before


def refused(path: Path, kind: type[Exception], match: str) -> tuple[Image, Image]:
    """Load what must be refused; returns what a trained net held before, and what it holds then."""
    net = nets(1, steps=range(2))[0]
    before = image(net)
    with Saver(rank=0) as saver, pytest.raises(kind, match=match):
        saver.load(net, path)
    return before, image(net)


def test_folder_of_a_rank_that_is_missing(path: Path) -> None:
    ranks = nets(3, steps=range(3))
    save(ranks, path, step=1)
    shutil.rmtree(path / rank_folder(rank=1, world_size=3))
    before, after = refused(path, NotFoundError, r"(?s)^(?!.*rank00001-of-00003).*rank00002-of-00003")
    assert after == before


def test_foreign_step_in_a_rank_folder_is_passed_over(path: Path) -> None:
    before = save(nets(1, steps=range(3)), path, step=1)
    with asyncckpt.Saver(path=path / rank_folder(rank=0, world_size=1), tensors={"w": torch.ones(2)}) as foreign:
        foreign.save(9)
    assert load(path, 1) == before


def test_one_step_of_two_world_sizes_is_refused(path: Path) -> None:
    save(nets(1, steps=range(3)), path / "a", step=1)
    save(nets(2, steps=range(3)), path / "b", step=1)
    shutil.move(path / "a" / rank_folder(rank=0, world_size=1), path / "b")
    with Saver(rank=0) as saver, pytest.raises(asyncckpt.ConflictError, match=r"different numbers of ranks.*\[1, 2\]"):
        saver.load(nets(1)[0], path / "b")


def test_one_step_in_both_forms_is_refused(path: Path) -> None:
    net = nets(1, steps=range(3))[0]
    with Saver(rank=0) as saver:
        saver.save(net, path, step=1)
        save(nets(2, steps=range(3)), path, step=1)
        with pytest.raises(asyncckpt.ConflictError, match=r"different numbers of ranks.*\[1, 2\]"):
            saver.load(net, path)


# -- damage ------------------------------------------------------------------------------------------------------------


def test_all_folders_are_checked_before_a_table_changes(path: Path) -> None:
    save(nets(2, steps=range(3)), path, step=1)
    file = next((path / rank_folder(rank=1, world_size=2)).rglob("*.safetensors"))
    file.unlink()
    before, after = refused(path, CorruptError, "is missing")
    assert after == before


def test_damage_in_a_later_folder_leaves_the_tables_empty(path: Path) -> None:
    save(nets(2, steps=range(3)), path, step=1)
    file = next((path / rank_folder(rank=1, world_size=2)).rglob("*.safetensors"))
    flip_byte(file)
    _, after = refused(path, CorruptError, "all multi-level tables of the module are empty now")
    assert not any(after.values())


def test_id_in_the_folders_of_two_ranks_is_found(path: Path) -> None:
    """As when the folder of one rank was copied over that of another."""
    save(nets(2, steps=range(3)), path, step=1)
    one, two = (path / rank_folder(rank=rank, world_size=2) for rank in (0, 1))
    shutil.rmtree(two)
    shutil.copytree(one, two)
    net = nets(1)[0]
    with Saver(rank=0) as saver, pytest.raises(CorruptError, match="holds an id in the folders of two ranks"):
        saver.load(net, path)
    assert not any(image(net).values())


def test_ranks_that_hold_different_tables_are_refused(path: Path) -> None:
    """A rank that saved counts of candidates, and one that did not."""
    ranks = [CachedNet(shard=(0, 2), admit_after=2).trained(range(3)), CachedNet(shard=(1, 2)).trained(range(3))]
    save(ranks, path, step=1)
    before, after = refused(path, CorruptError, r"different tables, found \['ad.candidates'\]")
    assert after == before


def test_one_process_saves_all_ranks_in_turn(path: Path) -> None:
    """As a conversion does that has one rank's tables at a time; a load of one rank never waits for the others."""
    three = nets(3, steps=range(4))
    before = union(image(net) for net in three)
    waits = []
    for rank in (2, 0, 1):
        with Saver(rank=rank, in_turn=True) as saver:
            waits.append(saver.save(three[rank], path).waits_for)
            assert asyncckpt.list_steps(path) == ([0] if rank == 1 else [])
    assert waits == [(0, 1), (1,), ()]
    assert load(path, 3) == load(path, 2) == before
    with Saver(rank=0, in_turn=True) as saver:
        assert saver.load(nets(2)[0], path).world_size == 3
    with pytest.raises(asyncckpt.UsageError, match="in_turn must be"):
        Saver(rank=0, in_turn=1)  # type: ignore[arg-type]
