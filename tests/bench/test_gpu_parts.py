"""Parts of the GPU benches, here with the library's kernels compiled for the CPU, and with the simulated device."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from asyncckpt.native.cuda import load_cuda_library
from bench.gpu_copies import SHARES, WIDTHS, Gather, measure_gathers
from bench.gpu_device import BenchDevice, NoDevice
from bench.host_part import run_host_part
from tests.cuda_on_cpu import cuda_on_cpu_library

BYTES = 64 << 10


@pytest.mark.parametrize("in_place", [False, True])
def test_a_gather_brings_the_rows(in_place: bool) -> None:
    torch.manual_seed(1)
    table, target = torch.randint(0, 256, (BYTES,), dtype=torch.uint8), torch.zeros(BYTES, dtype=torch.uint8)
    rows = torch.tensor([3, 5, 90, 127])
    library = load_cuda_library(cuda_on_cpu_library())
    Gather(BenchDevice("cpu"), library, table, target, rows, 512, in_place=in_place)()
    expected = torch.zeros(BYTES // 512, 512, dtype=torch.uint8)
    expected[rows if in_place else torch.arange(4)] = table.view(-1, 512)[rows]
    assert torch.equal(target.view(-1, 512), expected)


def test_every_width_and_share_is_measured() -> None:
    source, pinned = torch.zeros(2 * BYTES, dtype=torch.uint8), torch.zeros(BYTES, dtype=torch.uint8)
    library = load_cuda_library(cuda_on_cpu_library())
    figures = measure_gathers(BenchDevice("cpu"), library, source, pinned, table_bytes=BYTES, round_index=0)
    assert len(figures) == 3 * len(WIDTHS) * len(SHARES)
    for one in figures:
        assert one.bytes == max(1, int(BYTES // one.row_bytes * one.share)) * one.row_bytes
        assert one.seconds > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_nothing_is_measured() -> None:
    with pytest.raises(NoDevice):
        BenchDevice("cuda")


@pytest.mark.slow
def test_host_part_gives_figures(tmp_path: Path) -> None:
    figures = run_host_part(directory=tmp_path, out=tmp_path / "host-part", smoke=True)
    assert {(one["tensors"], bool(one["scratch_bytes"])) for one in figures} == {
        (count, scratch) for count in (1, 50) for scratch in (False, True)
    }
    assert all(math.isfinite(one["seconds"]) for one in figures)
    assert (tmp_path / "host-part.txt").read_text()
