"""Chains that are folded without a call for it: `DeltaPolicy(compact_after=)`; and `Checkpointer.compact`."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.storage.directory import Directory
from tests.worlds.rows import rows_of

ROWS = 4_000


class FewRows:
    """A table of which a step writes few rows, so that deltas are small."""

    def __init__(self) -> None:
        self.table = asyncckpt.HashTable("t", 4)
        self.table.insert(torch.arange(ROWS), torch.zeros(ROWS, 4))

    def train(self, step: int) -> None:
        ids = torch.arange(step, ROWS, 1009)
        self.table.insert(ids, torch.full((len(ids), 4), float(step)))

    def open(self, path: Path, compact_after: int | None) -> asyncckpt.Checkpointer:
        deltas = asyncckpt.DeltaPolicy(deltas_max=100, compact_after=compact_after)
        return asyncckpt.Checkpointer(path, every=1, deltas=deltas, t=self.table)


def chain_lengths(path: Path) -> list[int]:
    return [len(asyncckpt.describe(path, step).parents) for step in asyncckpt.list_steps(path)]


def test_a_chain_is_folded_after_so_many_deltas(tmp_path: Path) -> None:
    state = FewRows()
    with state.open(tmp_path, 3) as ckpt:
        for step in range(1, 12):
            state.train(step)
            ckpt.save_now(step)
            ckpt._saver.wait_idle(60)
    assert [step for step in range(1, 12) if asyncckpt.describe(tmp_path, step).compacted] == [4, 7, 10]
    assert max(chain_lengths(tmp_path)) <= 2
    found = asyncckpt.HashTable("t", 4)
    for step in (3, 4, 6, 7, 11):
        asyncckpt.Loader(tmp_path, {"t": found}, step=step).load()
        again = FewRows()
        for before in range(1, step + 1):
            again.train(before)
        assert rows_of(found) == rows_of(again.table)


def test_a_compaction_that_fails_is_logged_and_costs_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = FewRows()
    publish = Directory.publish

    def refuse(folder: Directory, source: str, target: str) -> None:
        if target.endswith(".full.json"):
            raise asyncckpt.errors.IOFailedError(f"{target!r} cannot be published")
        publish(folder, source, target)

    monkeypatch.setattr(Directory, "publish", refuse)
    with state.open(tmp_path, 1) as ckpt:
        for step in range(1, 4):
            state.train(step)
            ckpt.save_now(step)
            ckpt._saver.wait_idle(60)
    until = time.monotonic() + 20
    while len(caplog.records) < 2 and time.monotonic() < until:  # It is told when the wait for it has ended.
        time.sleep(0.01)
    told = [record.getMessage() for record in caplog.records]
    assert [text.split(" of ")[0] for text in told] == ["step 2", "step 3"]
    assert all(" is not compacted: '00000000000" in text for text in told)
    assert asyncckpt.list_steps(tmp_path) == [1, 2, 3]
    asyncckpt.verify(tmp_path)


def test_a_checkpointer_compacts_its_newest_step(tmp_path: Path) -> None:
    state = FewRows()
    with state.open(tmp_path, None) as ckpt:
        for step in range(1, 5):
            state.train(step)
            ckpt.save_now(step)
        assert chain_lengths(tmp_path) == [0, 1, 2, 3]
        assert not ckpt.compact().result(60).skipped
    assert chain_lengths(tmp_path) == [0, 1, 2, 0]
    with pytest.raises(asyncckpt.UsageError, match="is closed"):
        ckpt.compact()


@pytest.mark.parametrize("wrong", [0, True, 1.5, "3"])
def test_compact_after_is_a_number_of_deltas(wrong: object) -> None:
    with pytest.raises(asyncckpt.UsageError, match="compact_after"):
        asyncckpt.DeltaPolicy(compact_after=wrong)  # type: ignore[arg-type]
