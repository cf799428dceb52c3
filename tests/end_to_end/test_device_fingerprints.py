"""Full saves of tables on a device that nobody marks: rows are compared there, and only those that differ copied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.adapters import FixedTable
from asyncckpt.devices.library_kernels import LibraryKernels
from tests.simulated_device import SimulatedRuntime

pytestmark = pytest.mark.any_core

ROWS, DIM = 300, 5


class TableOfDevice:
    """A table of two columns on a device, and the same on the host."""

    def __init__(self, runtime: SimulatedRuntime, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.host = {"embedding": torch.randn(ROWS, DIM), "sum": torch.randn(ROWS)}
        self.device = {
            name: runtime.new_tensor(column.shape, column.dtype, values=column) for name, column in self.host.items()
        }
        self.table = FixedTable("t", lambda: self.device)

    def write(self, rows_count: int) -> None:
        rows = torch.from_numpy(self.random.choice(ROWS, rows_count, replace=False))
        columns = [["embedding"], ["sum"], ["embedding", "sum"]][self.random.integers(3)]
        for name in columns:
            self.host[name][rows] += 1.0
            self.device[name][rows] += 1.0


@contextmanager
def marks_counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many rows each launch of copy_marked took."""
    found: list[int] = []
    real = LibraryKernels.copy_marked

    def counting(self: LibraryKernels, columns: Any, marks: int, rows_count: int, holder: Any) -> None:
        values = self._runtime.view(marks, rows_count, self._device)
        found.append(int(values.sum()))
        real(self, columns, marks, rows_count, holder)

    with monkeypatch.context() as patched:
        patched.setattr(LibraryKernels, "copy_marked", counting)
        yield found


def check(path: Path, step: int, expected: dict[str, torch.Tensor]) -> None:
    columns = {"embedding": torch.zeros(ROWS, DIM), "sum": torch.zeros(ROWS)}
    asyncckpt.Loader(path, hashtables={"t": FixedTable("t", lambda: columns)}, step=step).load()
    for name, column in columns.items():
        assert torch.equal(column, expected[name]), name


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("scratch_bytes", [0, 1 << 20])
def test_only_rows_that_differ_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, scratch_bytes: int
) -> None:
    runtime = SimulatedRuntime(seed=seed, kernels="library")
    with runtime.installed(), marks_counted(monkeypatch) as counted:
        trained = TableOfDevice(runtime, seed)
        expected, written = {}, [0, 1, 17, 299, 3]
        with asyncckpt.Saver(
            path=tmp_path,
            hashtables={"t": trained.table},
            device=asyncckpt.DeviceOptions(fingerprints=True, scratch_bytes=scratch_bytes),
        ) as saver:
            for step, count in enumerate(written):
                trained.write(count)
                expected[step] = {name: column.clone() for name, column in trained.host.items()}
                future = saver.save_async(step)
                trained.write(50)
                future.result(60)
                for name, column in trained.host.items():  # Back to what was saved, as far as the device is told.
                    column.copy_(expected[step][name])
                    trained.device[name].copy_(expected[step][name])
    for step, state in expected.items():
        check(tmp_path, step, state)
    assert counted == written[1:], "the first save copies all rows; later ones those that were written"


def test_two_arenas_know_their_own_rows(tmp_path: Path) -> None:
    runtime = SimulatedRuntime(seed=1, kernels="library")
    with runtime.installed():
        trained = TableOfDevice(runtime, 1)
        expected = []
        with asyncckpt.Saver(
            path=tmp_path,
            hashtables={"t": trained.table},
            device=asyncckpt.DeviceOptions(fingerprints=True),
            on_busy="queue",
        ) as saver:
            for step in range(8):
                trained.write(10)
                expected.append({name: column.clone() for name, column in trained.host.items()})
                saver.save_async(step)
            saver.wait_idle()
    for step, state in enumerate(expected):
        check(tmp_path, step, state)


@pytest.mark.parametrize(
    ("kernels", "options"),
    [
        ("library", {}),
        ("torch", {"device": asyncckpt.DeviceOptions(fingerprints=True)}),
        ("library", {"device": asyncckpt.DeviceOptions(fingerprints=True, pinned_memory_limit=0)}),
    ],
    ids=["not asked for", "kernels that cannot compare", "memory that kernels cannot write to"],
)
def test_without_them_all_rows_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: Any, options: dict[str, Any]
) -> None:
    runtime = SimulatedRuntime(seed=2, kernels=kernels)
    with runtime.installed(), marks_counted(monkeypatch) as counted:
        trained = TableOfDevice(runtime, 2)
        with asyncckpt.Saver(path=tmp_path, hashtables={"t": trained.table}, **options) as saver:
            for step in range(3):
                trained.write(10)
                saver.save_async(step).result(60)
                check(tmp_path, step, trained.host)
    assert not counted
