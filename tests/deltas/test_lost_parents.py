"""What others remove of a chain is missed before a delta is chosen, and what was compacted ends the chain."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import DeltaPolicy, HashTable, Loader, Saver, SaveResult
from tests.worlds.directories import document_of, manifest_path
from tests.worlds.rows import rows_of

DIM = 256
ALWAYS = DeltaPolicy(deltas_max=1000, bytes_share_max=1e9)


class ChangedTable:
    """A table that is changed before every save, and the rows of every step."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        self.table = HashTable("user", DIM)
        self.rows: dict[int, Any] = {}
        self.table.insert(torch.arange(300), torch.zeros(300, DIM))
        self.saver = Saver(path=root, hashtables={"user": self.table}, **({"deltas": ALWAYS} | options))

    def __enter__(self) -> ChangedTable:
        return self

    def __exit__(self, *_: object) -> None:
        self.saver.close()

    def save(self, step: int, **options: Any) -> SaveResult:
        self.table.insert(torch.tensor([step, 1000 + step]), torch.full((2, DIM), float(step)))
        self.rows[step] = rows_of(self.table)
        return self.saver.save_async(step, **options).result(60)

    def parents(self, step: int) -> list[int]:
        return [parent["step"] for parent in document_of(self.root, step)["parents"]]

    def check(self, step: int) -> None:
        table = HashTable("user", DIM)
        Loader(self.root, {"user": table}, step=step).load()
        assert rows_of(table) == self.rows[step]


def remove_manifest(root: Path, step: int) -> None:
    manifest_path(root, step).unlink()


def remove_folder(root: Path, step: int) -> None:
    for folder in (root / "data").glob(f"{step:012d}-*"):
        shutil.rmtree(folder)


def remove_file(root: Path, step: int) -> None:
    next((root / "data").glob(f"{step:012d}-*/*")).unlink()


def save_again(root: Path, step: int) -> None:
    """Put another checkpoint in the place of a step."""
    remove_folder(root, step)
    other = root.parent / "other"
    with ChangedTable(other) as run:
        run.save(step)
    shutil.copy(manifest_path(other, step), manifest_path(root, step))
    for folder in (other / "data").iterdir():
        shutil.copytree(folder, root / "data" / folder.name)


ALL = [remove_manifest, remove_folder, remove_file, save_again]


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("lose", ALL)
def test_the_next_save_is_a_full_one_when_a_parent_is_gone(
    lose: Callable[[Path, int], None], step: int, tmp_path: Path
) -> None:
    with ChangedTable(tmp_path / "run") as run:
        assert [run.save(number).kind for number in range(3)] == ["full", "delta", "delta"]
        lose(run.root, step)
        with pytest.warns(RuntimeWarning, match="is missing or damaged.*this save is a full one") as caught:
            assert run.save(3).kind == "full"
        assert len(caught) == 1
        assert f"step {step}" in str(caught[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [run.save(4).kind, run.save(5).kind] == ["delta", "delta"]
        for number in (3, 4, 5):
            run.check(number)


@pytest.mark.parametrize("lose", ALL)
@pytest.mark.parametrize("deltas", [None, ALWAYS])
def test_a_delta_upon_what_is_gone_is_refused_before_anything_is_changed(
    lose: Callable[[Path, int], None], deltas: DeltaPolicy | None, tmp_path: Path
) -> None:
    with ChangedTable(tmp_path / "run", deltas=deltas) as run:
        run.save(0)
        run.save(1, kind="delta")
        lose(run.root, 0)
        before = sorted(path for path in run.root.rglob("*"))
        for _ in range(2):
            with pytest.raises(
                asyncckpt.ConflictError, match="step 1, the base of the delta, is missing or damaged"
            ) as e:
                run.saver.save_async(2, kind="delta")
            assert "kind='full'" in str(e.value)
        assert sorted(path for path in run.root.rglob("*")) == before
        assert run.save(2, kind="full").kind == "full"
        assert run.save(3, kind="delta").kind == "delta"
        run.check(3)


@pytest.mark.parametrize("kind", ["auto", "delta"])
def test_a_parent_that_goes_while_a_delta_is_written_ends_that_and_the_next_one_is_full(
    kind: Any, tmp_path: Path
) -> None:
    lost = []

    def lose(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
        for step in lost:
            remove_manifest(tmp_path, step)
        return blocks

    with ChangedTable(tmp_path, filter_func=lose) as run:
        run.save(1)
        lost.append(1)
        with pytest.raises(asyncckpt.ConflictError, match="step 1, the base of the delta"):
            run.save(2, kind=kind)
        lost.clear()
        assert run.save(3).kind == "full"
        run.check(3)


def test_a_delta_whose_base_is_damaged_says_so_and_the_next_save_is_full(tmp_path: Path) -> None:
    with ChangedTable(tmp_path) as run:
        run.save(1)
        for file in (tmp_path / "data").glob("*/*.safetensors"):
            os.truncate(file, 100)
        with pytest.raises(asyncckpt.ConflictError, match=r"base of the delta, is missing or damaged.*save again"):
            run.save(2)
        assert run.save(3).kind == "full"
        run.check(3)


def test_full_saves_do_not_mind_that_an_older_one_is_gone(tmp_path: Path) -> None:
    with ChangedTable(tmp_path) as run, warnings.catch_warnings():
        warnings.simplefilter("error")
        run.save(0)
        remove_folder(tmp_path, 0)
        assert run.save(1, kind="full").kind == "full"


def test_a_chain_counts_from_what_was_compacted(tmp_path: Path) -> None:
    with ChangedTable(tmp_path, deltas=DeltaPolicy(deltas_max=3, bytes_share_max=1e9), keep=2) as run:
        kinds = []
        for step in range(8):
            kinds.append(run.save(step).kind)
            run.saver.compact(step).result(60)
            assert len(run.parents(step)) == bool(step)
        assert kinds == ["full", *["delta"] * 7]
        assert [run.save(step).kind for step in range(8, 12)] == ["delta"] * 3 + ["full"]
        run.saver.wait_idle(60)
        for step in asyncckpt.list_steps(tmp_path):
            run.check(step)


@pytest.mark.parametrize(
    "policy",
    [DeltaPolicy(deltas_max=1000, bytes_share_max=0.5), DeltaPolicy(1000, bytes_share_max=1e9, seconds_max=40.0)],
)
def test_bytes_and_age_count_from_what_was_compacted(
    policy: DeltaPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compaction there is a full one after two deltas, or after one."""
    now = [100.0]
    monkeypatch.setattr("asyncckpt.engine.features.deltas.time.monotonic", lambda: now[0])
    monkeypatch.setattr("asyncckpt.engine.save.run_save.time.monotonic", lambda: now[0])
    with ChangedTable(tmp_path, deltas=policy) as run:
        kinds = []
        for step in range(7):
            run.table.insert(torch.arange(60), torch.rand(60, DIM))
            kinds.append(run.save(step).kind)
            now[0] += 25.0
            if step in (1, 3):
                run.saver.compact(step).result(60)
    assert kinds == ["full", *["delta"] * 5, "full"]


def test_a_compaction_in_the_middle_of_a_chain_shortens_it(tmp_path: Path) -> None:
    with ChangedTable(tmp_path) as run:
        for step in range(5):
            run.save(step)
        run.saver.compact(2).result(60)
        run.save(5)
        assert run.parents(5) == [4, 3, 2]
        for step in (0, 1):  # They are needed by nobody any more.
            remove_manifest(tmp_path, step)
            remove_folder(tmp_path, step)
        manifest_path(tmp_path, 2).unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert run.save(6).kind == "delta"
        assert run.parents(6) == [5, 4, 3, 2]
        for step in (2, 3, 4, 5, 6):
            run.check(step)
        assert asyncckpt.verify(tmp_path, 6).steps == (6, 5, 4, 3, 2)


@pytest.mark.parametrize("lose", [remove_folder, remove_file])
def test_a_compacted_parent_that_is_gone_is_missed(lose: Callable[[Path, int], None], tmp_path: Path) -> None:
    with ChangedTable(tmp_path, keep=1) as run:
        for step in range(3):
            run.save(step)
        run.saver.compact(2).result(60)
        run.save(3)
        run.saver.wait_idle(60)
        assert asyncckpt.list_steps(tmp_path) == [2, 3]
        lose(tmp_path, 2)
        with pytest.warns(RuntimeWarning, match="this save is a full one"):
            assert run.save(4).kind == "full"
        run.check(4)
