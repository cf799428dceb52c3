"""Saves of tables whose rows, or whose cache levels, are on devices: training goes on behind the call, on the device.

Every checkpoint is compared with a table on the host that was trained alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt import DebugOptions, DeviceOptions
from asyncckpt.adapters.fbgemm_cache import CachedTable
from asyncckpt.devices.host_copies import DeviceCopies
from asyncckpt.snapshot import table_capture
from asyncckpt.tables import HashTable, MultiLevelTable, Uniform
from tests.shares import slow_but_for_a_share
from tests.simulated_device import SimulatedRuntime
from tests.unit.tables.simulated_rows import tables_on_a_device
from tests.worlds.rows import rows_of

pytestmark = [
    pytest.mark.any_core,
    pytest.mark.filterwarnings("ignore:cache of table", "ignore:asyncckpt:RuntimeWarning"),
]

Contents = dict[int, tuple[float, ...]]

COLUMNS: dict[str, Any] = {
    "optimizer_slots": {"sum": torch.float32, "wide": (torch.float16, (70,))},
    "metadata": {"last_seen": torch.int64},
    "initializer": Uniform(0.5, seed=3),
}
KINDS = ["hash", "levels", "pinned"]


def new_table(kind: str) -> Any:
    if kind == "hash":
        return HashTable("t", 3, capacity=8, **COLUMNS)
    return MultiLevelTable("t", 3, cache_rows=12, capacity=64, pin_host_memory=kind == "pinned", **COLUMNS)


def train_rows(rows: Any, *, step: int) -> None:
    for name in ("sum", "wide", "last_seen"):
        rows[name] += step
    rows.embedding *= step % 3 - 0.5


def train(tables: Sequence[Any], step: int, seed: int) -> None:
    """The same step on all tables: an update of rows, and now and then other uses."""
    random = np.random.default_rng([seed, step])
    ids, others = np.unique(random.zipf(1.2, size=8) % 60), random.integers(0, 60, size=5)
    for table in tables:
        rows = torch.from_numpy(table.lookup_rows(ids))
        if step % 5 == 4:  # As code does that knows nothing of marks.
            for name in ("sum", "wide", "last_seen"):
                table.slot(name)[rows] += step
            table.embedding[rows] *= step % 3 - 0.5
        else:
            table.update(rows, partial(train_rows, step=step))
        if step % 3 == 0:
            table.remove(others)
        if step % 4 == 1:
            table.insert(torch.from_numpy(others), torch.full((5, 3), float(step)))
        if step % 2 and isinstance(table, MultiLevelTable):
            table.prefetch(np.arange(60)[random.permutation(60)[:4]])


def loaded(path: Path, step: int) -> Contents:
    target = new_table("hash")
    asyncckpt.Loader(path, hashtables={"t": target}, step=step).load()
    return rows_of(target)


def trained_and_saved(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    *,
    seed: int,
    kernels: str = "plain",
    blocking: bool = False,
    **options: Any,
) -> dict[int, Contents]:
    """Save every other step, training on right behind the call; what each checkpoint must hold."""
    expected: dict[int, Contents] = {}
    twin = new_table("hash")
    with tables_on_a_device(monkeypatch, seed=seed, pin_host_memory=kind == "pinned", kernels=kernels):
        table = new_table(kind)
        with asyncckpt.Saver(path=path, hashtables={"t": table}, on_busy="wait", durability="none", **options) as saver:
            for step in range(1, 11):
                train([table, twin], step, seed)
                if step % 2 == 0:
                    expected[step] = rows_of(twin)
                    if blocking:
                        saver.save(step)
                    else:
                        saver.save_async(step)
    return expected


WAYS: dict[str, dict[str, Any]] = {
    "straight": {},
    "by scratch": {"device": DeviceOptions(scratch_bytes=1 << 30)},
    "partly by scratch": {"device": DeviceOptions(scratch_bytes=9000)},
    "pageable": {"device": DeviceOptions(pinned_memory_limit=0)},
    "kernels of torch": {"kernels": "torch", "device": DeviceOptions(scratch_bytes=9000)},
    "not refreshed": {"debug": DebugOptions(refresh=False)},
    "deltas": {"deltas": asyncckpt.DeltaPolicy(deltas_max=4)},
    "first touch": {"device": DeviceOptions(host_level="first_touch")},
    "filtered": {"filter_func": lambda blocks: list(blocks)},
    "blocking": {"blocking": True},
    "no memory": {"host_memory_limit": 0},
}


@pytest.mark.parametrize(("kind", "way"), slow_but_for_a_share(product(KINDS, WAYS), "tables of devices", every=3))
def test_every_checkpoint_is_that_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, way: str
) -> None:
    seed = 10 * [*WAYS].index(way) + KINDS.index(kind)
    expected = trained_and_saved(tmp_path, monkeypatch, kind, seed=seed, **WAYS[way])
    assert {step: loaded(tmp_path, step) for step in expected} == expected


# -- what is copied ----------------------------------------------------------------------------------------------------


class Listed:
    """What was listed for devices: bytes of plain copies, and (columns, rows) of copies by index."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plain_sizes: list[int] = []
        self.by_index: list[tuple[int, int]] = []
        add, add_rows = DeviceCopies.add, DeviceCopies.add_rows

        def noting(copies: DeviceCopies, segments: Any, *keep: object) -> None:
            self.plain_sizes += segments[:, 2].tolist()
            add(copies, segments, *keep)

        def noting_rows(copies: DeviceCopies, columns: Any, source_rows: Any, *more: Any) -> None:
            self.by_index.append((len(columns), len(source_rows)))
            add_rows(copies, columns, source_rows, *more)

        monkeypatch.setattr(DeviceCopies, "add", noting)
        monkeypatch.setattr(DeviceCopies, "add_rows", noting_rows)


def test_of_wide_columns_only_touched_rows_leave_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_count, touched = 200, [3, 77, 140]
    with tables_on_a_device(monkeypatch, seed=1):
        table = HashTable("t", 32, optimizer_slots={"sum": ()}, capacity=rows_count)
        table.lookup(np.arange(rows_count))
        with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}, durability="none") as saver:
            for step in (1, 2):  # Both arenas.
                saver.save_async(step).result()
            table.update(table.lookup_rows(np.array(touched)), lambda rows: rows.embedding.fill_(5.0))
            listed = Listed(monkeypatch)
            result = saver.save_async(3).result()
    # Of the sums, 4 bytes a row, 3 of 200 are as many as a copy of all is worth.
    assert listed.by_index == [(2, 3)]
    assert listed.plain_sizes == []
    assert result.rows_copied == 3


def test_holes_are_copied_too_and_filled_by_tails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_capture, "DEVICE_PIECE_BYTES", 1000)
    with tables_on_a_device(monkeypatch, seed=2) as place:
        table = HashTable("t", 5, capacity=128)
        rows = torch.from_numpy(table.lookup_rows(np.arange(120)))
        table.embedding[rows] = torch.arange(600.0).view(120, 5)
        table.remove(np.arange(1, 60, 2))  # A hole behind every other row: 30 runs of one row.
        listed = Listed(monkeypatch)
        with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}, durability="none") as saver:
            saver.save_async(1)
            table.embedding.zero_()
        assert place.runtime.read(table.embedding).any().item() is False
    assert listed.plain_sizes == [1000, 800]  # 90 rows of 20 bytes.
    assert listed.by_index == [(1, 30)]
    target = HashTable("t", 5)
    asyncckpt.Loader(tmp_path, hashtables={"t": target}).load()
    ids = target.ids()
    assert ids.sort().values.tolist() == [*range(0, 60, 2), *range(60, 120)]
    assert torch.equal(target.embedding[target.used_rows()], torch.arange(600.0).view(120, 5)[ids])


@pytest.mark.parametrize("row_bytes", [1, 4, 8, 32, 127, 128, 4096])
def test_the_numbers_of_rows_take_little_memory(row_bytes: int) -> None:
    share = table_capture.by_index_share_max(row_bytes, on_device=True)
    assert 0 < share <= table_capture.DEVICE_SHARE_MAX
    assert 16 * share <= row_bytes / 16


# -- levels at any places ----------------------------------------------------------------------------------------------

PLACES = ["host", "device 0", "device 1"]


class Slots:
    """What TbeCache tells of the cached rows of a table."""

    def __init__(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        self._found = rows, values

    def cached_rows(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._found

    def hold_prefetch_back(self) -> None: ...


def placed(runtime: SimulatedRuntime, place: str, values: torch.Tensor) -> torch.Tensor:
    if place == "host":
        return values.clone()
    return runtime.new_tensor(values.shape, values.dtype, int(place[-1]), values=values)


@pytest.mark.parametrize(
    "options", [{}, {"device": DeviceOptions(scratch_bytes=500)}, {"filter_func": list}, {"blocking": True}]
)
@pytest.mark.parametrize("cached_at", PLACES)
@pytest.mark.parametrize("stored_at", PLACES)
def test_cached_rows_win_wherever_they_are(
    tmp_path: Path, stored_at: str, cached_at: str, options: Mapping[str, Any]
) -> None:
    options = dict(options)
    blocking = options.pop("blocking", False)
    stored, cached = torch.arange(60.0).view(20, 3), -torch.arange(15.0).view(5, 3)
    rows = torch.tensor([4, 19, 0, 7, 8])
    runtime = SimulatedRuntime(2, seed=PLACES.index(stored_at) + 3 * PLACES.index(cached_at))
    with runtime.installed():
        storage, values = placed(runtime, stored_at, stored), placed(runtime, cached_at, cached)
        slots: Any = Slots(rows, values)
        table = CachedTable("t", lambda: {"embedding": storage}, first_id=0, ids_end=None, cache=slots, index=0)
        with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}, durability="none", **options) as saver:
            if blocking:
                saver.save(1)
            else:
                saver.save_async(1)
            storage.fill_(77.0)
            values.fill_(88.0)
    target = asyncckpt.HashTable("t", 3)
    asyncckpt.Loader(tmp_path, hashtables={"t": target}).load()
    expected = stored.clone()
    expected[rows] = cached
    assert torch.equal(target.embedding[target.used_rows()], expected[target.ids()])
