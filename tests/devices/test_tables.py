"""Tables with columns on devices: full saves, refreshed ones, deltas; with a cache level here or there."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.devices import host_copies
from asyncckpt.devices.fetch import to_host
from asyncckpt.devices.library_kernels import LibraryKernels
from asyncckpt.modules.fixed_table import FixedTable
from asyncckpt.options import SaveKind
from tests.devices.tables import DeviceTable, Rows, new_target, rows_of
from tests.simulated_device import SimulatedRuntime
from tests.simulated_device.runtime import KernelsChoice

SEEDS_COUNT = 7
STEPS = 5
# (storage, cache): a device, "host" or, of the cache, None.
LEVELS = [(0, None), (0, 0), ("host", 0), (0, "host"), (0, 1), ("host", "host")]
KERNELS: tuple[KernelsChoice, ...] = ("plain", "library", "torch")


def new_table(runtime: SimulatedRuntime, choices: random.Random, storage: object, cache: object) -> DeviceTable:
    table = DeviceTable(
        runtime,
        capacity=choices.choice([40, 150]),
        storage=storage if isinstance(storage, int) else None,
        cache=cache if isinstance(cache, int) else None,
        cache_rows=0 if cache is None else choices.choice([3, 12]),
        has_marks=choices.random() < 0.6,
    )
    table.insert(range(100, 100 + choices.choice([0, 10, 35])))
    return table


def train(table: DeviceTable, choices: random.Random) -> None:
    """A few changes of rows, and of where they are."""
    table.insert(range(1000 + 50 * table._number, 1000 + 50 * table._number + choices.choice([0, 1, 5])))
    ids = list(table.rows)
    choices.shuffle(ids)
    table.remove(ids[: choices.choice([0, 0, 1, len(ids) // 4])])
    ids = list(table.rows)
    choices.shuffle(ids)
    table.move_to_cache(ids[: choices.choice([0, 2, 12])])
    table.write(choices.sample(ids, k=min(len(ids), choices.choice([0, 1, 3, len(ids)]))))


def wrong_steps(storage: object, cache: object, seed: int, path: Path) -> list[int]:
    """Train and save; returns the steps whose checkpoint does not hold the rows of the cut."""
    choices = random.Random(seed)
    runtime = SimulatedRuntime(2, seed=seed, kernels=KERNELS[seed % len(KERNELS)])
    cuts: dict[int, Rows] = {}
    with runtime.installed():
        table = new_table(runtime, choices, storage, cache)
        saver = asyncckpt.Saver(
            path=path,
            hashtables={"table": table},
            tensors={"dense": runtime.new_tensor((7,), torch.float32)},
            on_busy="queue",
            durability="none",
            device=asyncckpt.DeviceOptions(
                scratch_bytes=choices.choice([0, 600, 3000, 1 << 20]),
                pinned_memory_limit=choices.choice([None, None, 0]),
                fingerprints=choices.random() < 0.5,
            ),
            filters=[asyncckpt.filters.skip_zero_rows("table@sum")] if choices.random() < 0.2 else [],
        )
        with saver:
            for step in range(STEPS):
                train(table, choices)
                cuts[step] = dict(table.rows)
                if choices.random() < 0.15:
                    saver.wait_idle()
                    saver.save(step)
                    continue
                kind: SaveKind = "delta" if step and choices.random() < 0.4 else "full"
                if kind == "delta" or choices.random() < 0.6:
                    saver.wait_idle()
                saver.save_async(step, kind=kind)
                train(table, choices)
        return [step for step, expected in cuts.items() if loaded_rows(path, step) != expected]


def loaded_rows(path: Path, step: int) -> Rows:
    target = new_target()
    asyncckpt.Loader(path, hashtables={"table": target}, tensors={"dense": torch.empty(7)}, step=step).load()
    return rows_of(target)


@pytest.mark.parametrize(("storage", "cache"), LEVELS)
@pytest.mark.parametrize("seed", range(SEEDS_COUNT))
def test_checkpoints_hold_the_rows_of_the_cut(storage: object, cache: object, seed: int, tmp_path: Path) -> None:
    assert wrong_steps(storage, cache, seed, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(("storage", "cache"), LEVELS)
def test_many_seeds(storage: object, cache: object, tmp_path: Path) -> None:
    for seed in range(1000, 1080):
        assert wrong_steps(storage, cache, seed, tmp_path / str(seed)) == [], seed


def test_cached_rows_that_come_before_those_of_the_storage_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    divide = host_copies._divide
    monkeypatch.setattr(host_copies, "_divide", lambda copies, bytes: divide(list(reversed(copies)), bytes))
    assert any(wrong_steps(0, 0, seed, tmp_path / str(seed)) for seed in range(20))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("scratch_bytes", [0, 2000, 1 << 20])
def test_touched_rows_of_a_fixed_table(kernels: KernelsChoice, scratch_bytes: int, tmp_path: Path) -> None:
    runtime = SimulatedRuntime(1, seed=scratch_bytes, kernels=kernels)
    with runtime.installed():
        live = runtime.new_tensor((200, 16), torch.float32, values=torch.zeros(200, 16))
        table = FixedTable("rows", lambda: {"embedding": live})
        table.track()
        twin, cuts, copied = torch.zeros(200, 16), [], []
        with asyncckpt.Saver(
            path=tmp_path,
            hashtables={"rows": table},
            device=asyncckpt.DeviceOptions(scratch_bytes=scratch_bytes),
            durability="none",
        ) as saver:
            for step in range(4):
                cuts.append(twin.clone())
                future = saver.save_async(step, kind="delta" if step == 3 else "full")
                for row in range(3 * step, 3 * step + 5):
                    live[row].fill_(step + row)
                    twin[row].fill_(step + row)
                    table.touch(torch.tensor([row]))
                copied.append(future.result(30).rows_copied)
        assert copied == [200, 5, 5, 5]
        for step, expected in enumerate(cuts):
            found = torch.zeros(200, 16)
            target = FixedTable("rows", lambda: {"embedding": found})  # noqa: B023
            asyncckpt.Loader(tmp_path, hashtables={"rows": target}, step=step).load()
            assert torch.equal(found, expected)


@pytest.mark.parametrize("width", [12, 20])
def test_rows_on_a_device_are_resized(width: int, tmp_path: Path) -> None:
    stored = torch.arange(200 * 16, dtype=torch.float32).view(200, 16)
    asyncckpt.save(tmp_path, {}, hashtables={"rows": FixedTable("rows", lambda: {"embedding": stored})})
    with SimulatedRuntime(1).installed() as runtime:
        live = runtime.new_tensor((200, width), torch.float32, values=torch.full((200, width), -1.0))
        target = FixedTable("rows", lambda: {"embedding": live})
        asyncckpt.Loader(tmp_path, hashtables={"rows": target}, resize=["rows"]).load()
        found, both = to_host(live), min(width, 16)
    assert torch.equal(found[:, :both], stored[:, :both])
    assert torch.equal(found[:, both:], torch.full((200, width - both), -1.0))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("seed", range(5))
def test_compared_rows_of_a_fixed_table(
    kernels: KernelsChoice, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody marks these; one column is on another device, and saves take turns in two arenas."""
    compared: list[int] = []
    copy_marked = LibraryKernels.copy_marked
    monkeypatch.setattr(
        LibraryKernels, "copy_marked", lambda self, *rest: (compared.append(1), copy_marked(self, *rest))[1]
    )
    choices = random.Random(seed)
    runtime = SimulatedRuntime(2, seed=seed, kernels=kernels)
    with runtime.installed():
        shapes = {"embedding": (60, 16), "sum": (60, 2)}
        twins = {name: torch.zeros(shape) for name, shape in shapes.items()}
        live = {
            name: runtime.new_tensor(shape, torch.float32, device, values=twins[name])
            for device, (name, shape) in enumerate(shapes.items())
        }
        cuts = []
        with asyncckpt.Saver(
            path=tmp_path,
            hashtables={"rows": FixedTable("rows", lambda: live)},
            on_busy="queue",
            durability="none",
            device=asyncckpt.DeviceOptions(fingerprints=True, scratch_bytes=choices.choice([0, 1 << 20])),
        ) as saver:
            for step in range(6):
                cuts.append({name: twin.clone() for name, twin in twins.items()})
                saver.save_async(step)
                for name in shapes:
                    for row in choices.sample(range(60), k=choices.choice([0, 2, 60])):
                        live[name][row].fill_(step + 1)
                        twins[name][row] = step + 1
                if choices.random() < 0.5:
                    saver.wait_idle()
        assert bool(compared) == (kernels != "torch")
        for step, expected in enumerate(cuts):
            found = {name: torch.zeros(shape) for name, shape in shapes.items()}
            target = FixedTable("rows", lambda: found)  # noqa: B023
            asyncckpt.Loader(tmp_path, hashtables={"rows": target}, step=step).load()
            assert all(torch.equal(found[name], expected[name]) for name in shapes), step
