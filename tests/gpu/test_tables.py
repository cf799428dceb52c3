"""Tables on the device while the device lags behind: full saves, refreshed ones, deltas, both levels.

A table on the host is trained by the same calls; what it holds at a cut is what the checkpoint must hold.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.tables.multi_level import MultiLevelTable
from asyncckpt.testing.image import Image
from tests.gpu.device import DEVICE, IS_CUDA, SHORT_CYCLES, keep_busy

WAIT_S = 120
SLOTS = {"sum": (), "momentum": torch.float32}
METADATA = {"last_seen": torch.int64}
COLUMNS = ("embedding", "sum", "momentum", "last_seen")
IDS = 900
Make = Callable[[str], Any]


def make_hash_table(device: str) -> asyncckpt.HashTable:
    return asyncckpt.HashTable("user", 16, optimizer_slots=SLOTS, metadata=METADATA, device=device, capacity=64)


def make_levels(device: str, *, pinned: bool = False) -> MultiLevelTable:
    options = {"pin_host_memory": True} if pinned and device != "cpu" else {}
    return MultiLevelTable(
        "user",
        16,
        cache_rows=300,
        optimizer_slots=SLOTS,
        metadata=METADATA,
        device=device,
        capacity=64,
        **options,
    )


MAKERS: dict[str, Make] = {
    "hash": make_hash_table,
    "levels": make_levels,
    "pinned levels": lambda device: make_levels(device, pinned=True),
}


class Pair:
    """A table on the device and one on the host, trained alike."""

    def __init__(self, make: Make, seed: int) -> None:
        self.table, self.shadow = make(DEVICE), make("cpu")
        self._random = np.random.default_rng(seed)

    def train(self, count: int = 200) -> None:
        ids = torch.from_numpy(self._random.choice(IDS, count, replace=False) - IDS // 2)
        gone = torch.from_numpy(self._random.choice(IDS, 20, replace=False) - IDS // 2)
        numbers = torch.from_numpy(self._random.standard_normal((count, 16))).float()
        for table in (self.table, self.shadow):
            table.lookup(ids)
            values = numbers.to(table.device)
            keep_busy(SHORT_CYCLES)
            with table.rows(ids) as rows:
                rows.embedding = values
                rows["sum"] = values[:, 0].contiguous()
                rows["momentum"] = values * 2
                rows["last_seen"] = torch.arange(count, device=table.device)
            table.remove(gone)

    def expected(self) -> Image:
        return image(self.shadow)


def image(table: Any) -> Image:
    if isinstance(table, MultiLevelTable):
        ids = table.ids()
        return Image.of({"id": ids, **table.read(ids)})
    rows = table.used_rows()
    columns = {name: table.slot(name)[rows] for name in COLUMNS[1:]}
    return Image.of({"id": table.ids(), "embedding": table.embedding[rows], **columns})


def assert_steps_hold(path: Path, make: Make, steps: dict[int, Image]) -> None:
    for step, expected in steps.items():
        for device in {DEVICE, "cpu"}:
            table = make(device)
            asyncckpt.Loader(path, {"user": table}, step=step).load()
            difference = image(table).difference(expected)
            assert difference is None, f"step {step} on {device}: {difference}"


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("refresh", [True, False])
@pytest.mark.parametrize("scratch", [0, 1 << 30])
def test_full_saves(tmp_path: Path, maker: str, refresh: bool, scratch: int) -> None:
    """Later ones refresh the arena with the rows that were touched, unless told not to."""
    pair, steps = Pair(MAKERS[maker], 1), {}
    with asyncckpt.Saver(
        path=tmp_path,
        hashtables={"user": pair.table},
        debug=asyncckpt.DebugOptions(refresh=refresh),
        device=asyncckpt.DeviceOptions(scratch_bytes=scratch),
    ) as saver:
        for step in range(5):
            pair.train(200 if step == 0 else 40)
            steps[step] = pair.expected()
            keep_busy()
            future = saver.save_async(step)
            pair.train(30)
            future.result(WAIT_S)
        saver.save(9)
        steps[9] = pair.expected()
    assert_steps_hold(tmp_path, MAKERS[maker], steps)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("scratch", [0, 1 << 30])
def test_deltas(tmp_path: Path, maker: str, scratch: int) -> None:
    pair, steps, kinds = Pair(MAKERS[maker], 2), {}, []
    with asyncckpt.Saver(
        path=tmp_path,
        hashtables={"user": pair.table},
        deltas=asyncckpt.DeltaPolicy(deltas_max=3, bytes_share_max=1e9),
        device=asyncckpt.DeviceOptions(scratch_bytes=scratch),
    ) as saver:
        for step in range(6):
            pair.train(40)
            steps[step] = pair.expected()
            keep_busy()
            future = saver.save_async(step)
            pair.train(30)
            kinds.append(future.result(WAIT_S).kind)
    assert "delta" in kinds
    assert_steps_hold(tmp_path, MAKERS[maker], steps)


@pytest.mark.parametrize("maker", ["levels", "pinned levels"])
@pytest.mark.parametrize("host_level", ["copy", "first_touch"])
def test_both_ways_to_save_the_host_level(tmp_path: Path, maker: str, host_level: Any) -> None:
    """Left open, the host level is exported while training evicts rows into it."""
    pair, steps = Pair(MAKERS[maker], 3), {}
    with asyncckpt.Saver(
        path=tmp_path, hashtables={"user": pair.table}, device=asyncckpt.DeviceOptions(host_level=host_level)
    ) as saver:
        for step in range(4):
            pair.train(250)
            steps[step] = pair.expected()
            keep_busy()
            future = saver.save_async(step)
            for _ in range(3):
                pair.train(250)
            future.result(WAIT_S)
    assert_steps_hold(tmp_path, MAKERS[maker], steps)


@pytest.mark.parametrize("maker", MAKERS)
def test_training_goes_on_from_a_load(tmp_path: Path, maker: str) -> None:
    """What is queued on a table before a load does not write over what is loaded."""
    pair = Pair(MAKERS[maker], 4)
    pair.train()
    expected = pair.expected()
    with asyncckpt.Saver(path=tmp_path, hashtables={"user": pair.table}) as saver:
        saver.save_async(1).result(WAIT_S)
    pair.train()
    keep_busy()
    asyncckpt.Loader(tmp_path, {"user": pair.table}).load()
    asyncckpt.Loader(tmp_path, {"user": pair.shadow}).load()
    difference = image(pair.table).difference(expected)
    assert difference is None, difference
    pair.train()
    difference = image(pair.table).difference(pair.expected())
    assert difference is None, difference


def test_a_module_of_a_table_trains_and_comes_back(tmp_path: Path) -> None:
    table = make_hash_table(DEVICE)
    module = asyncckpt.nn.HashEmbedding(table)
    optimizer = asyncckpt.optim.SparseAdagrad(module, lr=0.1)
    for seed in range(3):
        ids = torch.randint(0, 50, (40,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        module(ids).sum().backward()
        optimizer.step()
    expected = image(table)
    with asyncckpt.Saver(path=tmp_path, hashtables={"user": table}) as saver:
        saver.save_async(1).result(WAIT_S)
    other = make_hash_table(DEVICE)
    asyncckpt.Loader(tmp_path, {"user": other}).load()
    assert image(other).difference(expected) is None


@pytest.mark.skipif(not IS_CUDA, reason="only a device can show this")
def test_a_table_of_another_device_is_loaded_anywhere(tmp_path: Path) -> None:
    pair = Pair(make_hash_table, 5)
    pair.train()
    for number, table in enumerate((pair.table, pair.shadow)):
        with asyncckpt.Saver(path=tmp_path / str(number), hashtables={"user": table}) as saver:
            saver.save_async(1).result(WAIT_S)
        assert_steps_hold(tmp_path / str(number), make_hash_table, {1: pair.expected()})
