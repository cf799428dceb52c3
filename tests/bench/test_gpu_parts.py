"""Parts of the GPU benches, here with the library's kernels compiled for the CPU, and with the simulated device."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncckpt.native.cuda import load_cuda_library
from bench import gpu
from bench.gpu_copies import SHARES, WIDTHS, Gather, GatherFigures, measure_gathers
from bench.gpu_device import BenchDevice, NoDevice
from bench.gpu_saves import SaveCase, measure
from bench.host_part import WAYS, run_host_part
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


class NotingLoop:
    """A loop and a way to save that note in which order they were asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def run(self, tensors: Any, save: Callable[[], None]) -> tuple[float, float, float]:
        self.asked.append("loop")
        save()
        return float(len(self.asked)), 0.0, 0.0

    def save(self) -> None:
        self.asked.append("save")

    def finish(self) -> None:
        self.asked.append("finish")


def test_a_loop_without_a_save_is_run_before_and_behind() -> None:
    noting: Any = NotingLoop()
    case = SaveCase("some", 1, 8)
    one = measure(BenchDevice("cpu"), noting, case, {}, "ours", noting, round_index=0)
    assert noting.asked == ["loop", "loop", "save", "finish", "loop"]
    assert one.lost_seconds == 3 - (1 + 5) / 2


@pytest.mark.parametrize("round_index", [0, 1])
def test_rounds_go_there_and_back(round_index: int) -> None:
    assert list(gpu._in_turn("abc", round_index)) == (["a", "b", "c"], ["c", "b", "a"])[round_index]


@pytest.mark.slow
def test_what_was_measured_before_a_cut_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    def one_gather(*arguments: Any, **options: Any) -> list[GatherFigures]:
        return [GatherFigures(512, 0.1, "device", 0, 100, seconds=1.0, floor_seconds=0.5)]

    monkeypatch.setattr(gpu, "_add_loops", lambda *arguments, **options: None)
    monkeypatch.setattr(gpu, "measure_gathers", one_gather)
    monkeypatch.setattr(gpu, "measure_loads", cut)
    with pytest.raises(KeyboardInterrupt):
        gpu.run_gpu(directory=tmp_path, out=tmp_path / "gpu", smoke=True, device="cpu")
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert [one["row_bytes"] for one in written["gathers"]] == [512]
    assert {one["verdict"] for one in written["targets"]} == {"not measured", "missed"}
    assert "gathers of rows" in (tmp_path / "gpu.txt").read_text()


@pytest.mark.slow
def test_host_part_gives_figures(tmp_path: Path) -> None:
    figures = run_host_part(directory=tmp_path, out=tmp_path / "host-part", smoke=True)
    states = ["1 tensors", "50 tensors", "1 tensor of the host", "module of 20 parameters, AdamW"]
    states.append(states[-1] + ", in optimizers=")
    assert {(one["state"], one["way"]) for one in figures} == {(s, way) for s in states for way in WAYS}
    assert all(math.isfinite(one["seconds"]) and math.isfinite(one["processor_seconds"]) for one in figures)
    floors = json.loads((tmp_path / "host-part.json").read_text())["floors"]
    assert len(floors) == 4
    assert all(0 < seconds < math.inf for seconds in floors.values())
    assert (tmp_path / "host-part.txt").read_text()
