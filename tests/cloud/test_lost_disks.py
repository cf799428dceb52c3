"""A loop whose disk was lost goes on from where it uploads to, and tells one history there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.storage.object_store import ObjectStore
from tests.cloud import seaweed
from tests.cloud.fault_proxy import FaultProxy, Mishap
from tests.worlds.directories import flip_byte


def run(path: Path, url: str, *, to: int, back_to: int | None = None) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Train a table and a tensor; return where that began, the ids of the table, and the tensor."""
    table = asyncckpt.HashTable("late", 2, admit_after=2)
    late = asyncckpt.nn.HashEmbedding(table)
    total = torch.zeros(3)
    options = {"upload": url}
    deltas = asyncckpt.DeltaPolicy(deltas_max=2, bytes_share_max=9.0)
    with asyncckpt.Checkpointer(path, every=2, deltas=deltas, options=options, late=late, total=total) as ckpt:
        first = ckpt.restore() if back_to is None else ckpt.restore(back_to)
        for step in range(first, to):
            late(torch.tensor([step, step + 1]))
            total += step
            ckpt.step(step)
    return first, table.ids(), total


def test_a_loop_goes_on_from_where_it_uploads_to(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    run(tmp_path / "lost", url, to=6)
    shutil.rmtree(tmp_path / "lost")
    first, ids, total = run(tmp_path / "lost", url, to=9)
    assert first == 6
    assert total.tolist() == [sum(range(9))] * 3
    assert sorted(ids.tolist()) == list(range(1, 9))
    assert asyncckpt.list_steps(tmp_path / "lost")[-1] == asyncckpt.list_steps(url)[-1] == 8
    for step in asyncckpt.list_steps(url):
        asyncckpt.verify(url, step)
    first, _, again = run(tmp_path / "lost", url, to=9)  # The disk counts, where it has any.
    assert (first, again.tolist()) == (9, total.tolist())


def test_a_loop_that_does_not_restore_begins_no_second_history(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    run(tmp_path / "lost", url, to=6)
    newest = asyncckpt.list_steps(url)[-1]
    with asyncckpt.Checkpointer(tmp_path / "new", every=2, options={"upload": url}, x=torch.zeros(1)) as ckpt:
        with pytest.raises(asyncckpt.UsageError, match=f"not above step {newest}, the newest in '{url}'"):
            ckpt.step(newest)
        ckpt.step(newest + 1)  # Somebody has loaded that by other means.
    assert asyncckpt.list_steps(url)[-1] == newest + 1


def test_a_fresh_loop_does_not_wait_for_a_store_that_is_away(proxy: FaultProxy, url: str, tmp_path: Path) -> None:
    with asyncckpt.Checkpointer(tmp_path / "new", every=2, options={"upload": url}, x=torch.zeros(1)) as ckpt:
        proxy.fault = lambda request: Mishap(answer=(403, "ExpiredToken"))
        ckpt.step(1)
        proxy.fault = lambda request: None
    assert asyncckpt.list_steps(url) == [1]


def test_it_goes_back_no_further_than_to_the_newest_step_there(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    run(tmp_path / "lost", url, to=6)
    older, newest = asyncckpt.list_steps(url)[-2:]
    with pytest.raises(asyncckpt.UsageError, match=f"asyncckpt rm {url} --after {older}"):
        run(tmp_path / "new", url, to=9, back_to=older)
    with pytest.raises(asyncckpt.NotFoundError, match="step 77 is not in"):
        run(tmp_path / "new", url, to=9, back_to=77)
    assert run(tmp_path / "new", url, to=9, back_to=newest)[0] == newest + 1


def test_a_damaged_step_there_is_no_empty_directory(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    run(tmp_path / "lost", url, to=4)
    store = ObjectStore(StoreUrl.of(url))
    for found in store.below("data"):
        store.remove(found.key)
    with pytest.raises(asyncckpt.CorruptError, match="is missing"):
        run(tmp_path / "new", url, to=9)
    assert asyncckpt.list_steps(tmp_path / "new") == []


def damage(path: Path, step: int) -> None:
    flip_byte(max((path / name for name in asyncckpt.describe(path, step).files), key=lambda file: file.stat().st_size))


def train_on(path: Path | str, url: str | None, to: int) -> asyncckpt.LoadReport | None:
    """Restore with fallback, and train a tensor on, every step saved."""
    total = torch.zeros(1 << 12)
    options = {} if url is None else {"upload": url}
    with asyncckpt.Checkpointer(path, every=1, options=options, total=total) as ckpt:
        first = ckpt.restore(fallback=True)
        assert total.unique().tolist() == [sum(range(first))]
        for step in range(first, to):
            total += step
            ckpt.step(step, save=True)
        return ckpt.report


def test_a_copy_in_the_store_is_better_than_an_older_step(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    train_on(tmp_path, url, 4)
    damage(tmp_path, 3)
    report = train_on(tmp_path, url, 6)
    assert report is not None
    assert (report.step, report.fallback_from, report.path) == (3, (), StoreUrl.of(url))
    assert not (tmp_path / "damaged").exists()
    assert asyncckpt.list_steps(tmp_path) == asyncckpt.list_steps(url) == list(range(6))


def test_damaged_steps_in_a_store_are_put_aside_there(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    train_on(tmp_path, url, 4)
    store = ObjectStore(StoreUrl.of(url))
    shutil.rmtree(tmp_path)
    for name in asyncckpt.describe(url, 3).files:
        store.remove(name)
    report = train_on(tmp_path / "new", url, 5)
    assert report is not None
    assert (report.step, report.fallback_from) == (2, (3,))
    assert asyncckpt.list_steps(url) == list(range(5))
    assert asyncckpt.list_steps(tmp_path / "new") == [3, 4]
    for step in range(5):
        asyncckpt.verify(url, step)
    assert [found.key.split("/")[-1] for found in store.below("damaged")] == ["000000000003.json"]


def test_a_directory_in_a_store_falls_back_as_one_on_a_disk(owner: seaweed.Server, url: str) -> None:
    train_on(url, None, 4)
    store = ObjectStore(StoreUrl.of(url))
    for name in asyncckpt.describe(url, 3).files:
        store.remove(name)
    report = train_on(url, None, 5)
    assert report is not None
    assert (report.step, report.fallback_from) == (2, (3,))
    assert asyncckpt.list_steps(url) == list(range(5))


def test_an_older_step_in_the_store_is_better_than_a_still_older_one(
    owner: seaweed.Server, url: str, tmp_path: Path
) -> None:
    train_on(tmp_path, url, 5)
    asyncckpt.checkpoints.remove(tmp_path, [2, 3])
    damage(tmp_path, 4)
    store = ObjectStore(StoreUrl.of(url))
    for name in asyncckpt.describe(url, 4).files:
        store.remove(name)
    report = train_on(tmp_path, url, 7)
    assert report is not None
    assert (report.step, report.fallback_from, report.path) == (3, (4, 4), StoreUrl.of(url))
    assert asyncckpt.list_steps(tmp_path) == [0, 1, 4, 5, 6]
    assert asyncckpt.list_steps(url) == list(range(7))
    for step in range(7):
        asyncckpt.verify(url, step)
