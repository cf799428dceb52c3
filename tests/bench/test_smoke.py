"""The benches run, at sizes of a few megabytes: the figures are there, the images are exact. No timing is asserted.

Those that take ten seconds and more go with the slow tests.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
SMOKE_SECONDS_MAX = 120
WEED = Path(sys.executable).parent / "weed"  # The S3 server of the tests.


def run_bench(command: str, out: Path, *options: str) -> Any:
    arguments = [command, "--smoke", "--out", str(out), "--dir", str(out.parent), *options]
    done = subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        cwd=REPOSITORY,
        timeout=SMOKE_SECONDS_MAX,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return json.loads(Path(f"{out}.json").read_text())


def assert_is_figure(*values: float | None) -> None:
    for value in values:
        assert value is not None
        assert math.isfinite(value)


@pytest.mark.slow
@pytest.mark.timeout(SMOKE_SECONDS_MAX)
def test_state_bench_gives_figures_and_exact_images(tmp_path: Path) -> None:
    result = run_bench("state", tmp_path / "state", "--peers", "raw_floor,asyncckpt,safetensors")
    assert result["images"] == {"raw_floor": "ok", "asyncckpt": "ok", "safetensors": "ok"}
    for one in result["rounds"]["1"]:
        assert len(one["saves"]) == 2
        for save in one["saves"]:
            for name in ("stall_seconds", "lost_seconds", "durable_seconds", "background_cpu_seconds"):
                assert_is_figure(save[name])
        assert one["files_bytes"] >= one["state_bytes"]
        for name in ("prepare_seconds", "load_cold_seconds", "load_warm_seconds"):
            assert_is_figure(one[name])
    assert (tmp_path / "state.png").stat().st_size > 0
    assert "time lost s" in (tmp_path / "state.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(SMOKE_SECONDS_MAX)
def test_steps_bench_gives_figures_and_its_control_is_caught(tmp_path: Path) -> None:
    result = run_bench("state", tmp_path / "steps", "--steps", "--peers", "raw_floor,asyncckpt_steps")
    assert result["images"]["asyncckpt_steps"] == ["ok"]
    assert result["images"]["asyncckpt_no_wait"] != ["ok"]
    for one in result["rounds"]["1"]:
        for name in ("stall_seconds", "lost_seconds", "durable_seconds"):
            assert_is_figure(one["saves"][-1][name])


@pytest.mark.slow
@pytest.mark.timeout(SMOKE_SECONDS_MAX)
def test_many_tensors_bench_gives_figures_and_exact_images(tmp_path: Path) -> None:
    result = run_bench("many-tensors", tmp_path / "many", "--peers", "raw_floor,asyncckpt")
    assert [one["image"] for one in result["rounds"]] == ["ok", "ok"]
    assert_is_figure(result["call_over_memcpy_ms"])
    assert set(result["copies"][0]) == {"copy kernel", "memcpy all cores", "memcpy one core", "round_index"}


@pytest.mark.slow
@pytest.mark.timeout(SMOKE_SECONDS_MAX)
def test_load_bench_gives_figures_and_exact_loads(tmp_path: Path) -> None:
    result = run_bench("load", tmp_path / "load", "--peers", "raw_floor,asyncckpt,safetensors")
    loads = {one["peer"]: one for one in result["loads"]}
    assert loads.keys() == {"raw_floor", "asyncckpt", "safetensors"}
    assert loads["asyncckpt"]["exact"]
    assert loads["safetensors"]["exact"]
    for load in loads.values():
        assert_is_figure(load["seconds"])


@pytest.mark.slow
@pytest.mark.timeout(SMOKE_SECONDS_MAX)
def test_multi_level_bench_gives_figures(tmp_path: Path) -> None:
    result = run_bench("multi-level", tmp_path / "multi-level")
    assert sorted(one["way"] for one in result["rounds"]) == ["copy", "first_touch"]
    for one in result["rounds"]:
        for save in one["saves"]:
            assert_is_figure(save["stall_seconds"])
            assert_is_figure(save["lost_seconds"])


@pytest.mark.slow
@pytest.mark.timeout(SMOKE_SECONDS_MAX)
def test_touched_bench_gives_figures(tmp_path: Path) -> None:
    result = run_bench("touched", tmp_path / "touched", "--zipf")
    assert [one["way"] for one in result["rounds"]] == ["refresh", "copy", "delta", "raw_floor"]
    saves = {one["way"]: one["saves"][0] for one in result["rounds"]}
    for save in saves.values():
        assert_is_figure(save["save"]["stall_seconds"])
        assert_is_figure(save["save"]["lost_seconds"])
    assert saves["refresh"]["rows_copied"] == saves["refresh"]["touched_rows"] == saves["delta"]["rows_count"]
    assert saves["copy"]["rows_copied"] == saves["copy"]["rows_count"]
    # Headers are much of so small a file; of a real one they are nothing.
    assert saves["delta"]["bytes_written"] < 1.1 * saves["delta"]["touched_bytes"] + 100_000
    assert_is_figure(result["marking"]["share"])
    assert len(result["zipf"]["bytes"]) == 4


@pytest.mark.slow
@pytest.mark.timeout(SMOKE_SECONDS_MAX)
def test_optimizers_bench_gives_rates(tmp_path: Path) -> None:
    result = run_bench("optimizers", tmp_path / "optimizers", "--dims", "8")
    found = {(figure["rule"], figure["contestant"].partition(" ")[0]) for figure in result["figures"]}
    assert {("SGD", "asyncckpt"), ("Adagrad", "torch"), ("row-wise Adam", "asyncckpt"), ("Adam", "torch")} <= found
    for figure in result["figures"]:
        assert_is_figure(figure["mrows_per_s"])
    assert "rows a second / torch's" in (tmp_path / "optimizers.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(SMOKE_SECONDS_MAX)
def test_dcp_bench_gives_figures(tmp_path: Path) -> None:
    result = run_bench("dcp", tmp_path / "dcp")
    assert {(one["world"], one["size"]) for one in result["saves"]} == {(2, "large"), (2, "small")}
    for one in result["saves"]:
        for name in ("save_seconds", "call_seconds", "durable_seconds", "lost_seconds"):
            assert_is_figure(one[name])


@pytest.mark.slow
@pytest.mark.timeout(SMOKE_SECONDS_MAX)
def test_endurance_bench_gives_figures(tmp_path: Path) -> None:
    notes = run_bench("endurance", tmp_path / "endurance")["notes"]
    assert notes[-1]["saves_count"] == 60
    assert {one["threads_count"] for one in notes} == {1}
    assert len({one["descriptors_count"] for one in notes}) == 1


@pytest.mark.slow
@pytest.mark.timeout(SMOKE_SECONDS_MAX)
@pytest.mark.skipif(find_spec("obstore") is None or not WEED.exists(), reason="there is no store here")
def test_uploads_bench_gives_figures(tmp_path: Path) -> None:
    rounds = run_bench("uploads", tmp_path / "uploads")["rounds"]
    assert [one["way"] for one in rounds] == ["put", "upload", "save", "get", "load"]
    assert "targets" in (tmp_path / "uploads.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(SMOKE_SECONDS_MAX)
@pytest.mark.skipif(find_spec("obstore") is None or not WEED.exists(), reason="there is no store here")
def test_uploads_beside_training_give_figures_and_exact_images(tmp_path: Path) -> None:
    rounds = run_bench("uploads", tmp_path / "training", "--training")["rounds"]["1"]
    peers = {"asyncckpt", "store_socket", "store_put", "store_asyncckpt", "store_asyncckpt_upload", "store_torch_save"}
    assert {one["peer"] for one in rounds} - {"store_dcp_fsspec"} == peers  # That one needs s3fs.
    for one in rounds:
        assert one["image"] == "ok"
        assert_is_figure(one["saves"][0]["lost_seconds"])


@pytest.mark.slow
@pytest.mark.timeout(SMOKE_SECONDS_MAX)
def test_compaction_bench_gives_figures(tmp_path: Path) -> None:
    rounds = {one["way"]: one for one in run_bench("compaction", tmp_path / "compaction")["rounds"]}
    assert rounds.keys() == {"alone", "beside", "held", "floor alone", "floor beside"}
    for one in rounds.values():
        assert_is_figure(one["durable_seconds"])
    assert rounds["held"]["beside"] > 3.5
    assert "targets" in (tmp_path / "compaction.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(SMOKE_SECONDS_MAX)
def test_path_bench_counts_files_on_all_threads(tmp_path: Path) -> None:
    cases = run_bench("path", tmp_path / "path", "--list")["cases"]
    assert cases.keys() == {"save", "chain"}
    save, chain = set(cases["save"]), set(cases["chain"])
    assert {
        "saver.py",
        "pipeline/threads.py",
        "commit/transaction.py",
    } < save  # The caller's thread, and those behind it.
    assert {"loader.py", "tables/row_store.py"} < chain - save
    assert not any(name.startswith("<module>") for functions in cases["save"].values() for name in functions)
    assert "commit/transaction.py" in (tmp_path / "path.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(SMOKE_SECONDS_MAX)
def test_gpu_bench_gives_figures_with_the_host_in_the_place_of_a_device(tmp_path: Path) -> None:
    result = run_bench("gpu", tmp_path / "gpu", "--device", "cpu")
    assert {(one["case"], one["way"]) for one in result["loops"]} == {
        (case["name"], way) for case in result["cases"] for way in ("straight", "scratch")
    }
    assert {"asyncckpt", "dcp, our stager and writer", "dcp, pinned stager"} < {one["way"] for one in result["peers"]}
    for one in [*result["loops"], *result["peers"]]:
        for name in ("host_seconds", "fence_seconds", "lost_seconds", "done_seconds"):
            assert_is_figure(one[name])
    assert {one["way"] for one in result["gathers"]} == {"index_select"}
    assert [one["exact"] for one in result["loads"]] == [True]
    assert "targets" in (tmp_path / "gpu.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(SMOKE_SECONDS_MAX)
def test_stepped_tables_bench_gives_figures_with_and_without_optimizers(tmp_path: Path) -> None:
    saves = run_bench("stepped-tables", tmp_path / "tables")["saves"]
    assert {(save["share"], save["optimizers"]) for save in saves} == {
        (share, with_it) for share in (0.01, 0.05, 0.2, 1.0) for with_it in (False, True)
    }


@pytest.mark.slow
@pytest.mark.timeout(SMOKE_SECONDS_MAX)
def test_parallel_bench_gives_a_figure_for_every_number(tmp_path: Path) -> None:
    runs = run_bench("parallel", tmp_path / "parallel")["runs"]
    assert {run["parallel"] for run in runs} == {1, 2, 4, 8, 16}
    for run in runs:
        assert_is_figure(run["save_seconds"], run["load_seconds"])


@pytest.mark.slow
@pytest.mark.timeout(SMOKE_SECONDS_MAX)
def test_recis_bench_gives_a_figure_for_every_conversion(tmp_path: Path) -> None:
    runs = run_bench("recis", tmp_path / "recis")["runs"]
    assert {"copy", "import", "export"} < runs.keys()
    for own in runs.values():
        assert_is_figure(*(run["seconds"] for run in own), *(run["memory_mib"] for run in own))


@pytest.mark.slow
@pytest.mark.timeout(SMOKE_SECONDS_MAX)
def test_start_bench_gives_a_figure_for_every_command(tmp_path: Path) -> None:
    seconds = run_bench("start", tmp_path / "start")["seconds"]
    alone = {"python -c pass", "python -c 'import torch'"}
    commands = {"--help", "--version", "show", "tree", "verify", "cat", "diff", "doctor"}
    assert seconds.keys() == alone | commands | {"ls of 3 steps", "ls of 20 steps", "show of 20 steps"}
    for taken in seconds.values():
        assert_is_figure(*taken)


@pytest.mark.slow
@pytest.mark.timeout(SMOKE_SECONDS_MAX)
@pytest.mark.parametrize("layout", ["tables", "delta"])
def test_two_checkouts_save_in_turn(tmp_path: Path, layout: str) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / ".venv").symlink_to(sys.prefix)
    (other / "bench").symlink_to(REPOSITORY / "bench")
    out = tmp_path / "beside"
    options = ["--layout", layout, "--gib", "0.01", "--saves", "2", "--dir", str(tmp_path), "--out", str(out)]
    command = [sys.executable, "-m", "bench.beside", str(other), *options]
    subprocess.run(command, cwd=REPOSITORY, timeout=SMOKE_SECONDS_MAX, check=True)
    saves = json.loads(out.with_suffix(".json").read_text())["saves"]
    assert {name: len(own) for name, own in saves.items()} == {"before": 2, "after": 2}
    for save in saves["before"] + saves["after"]:
        assert_is_figure(save["stall_seconds"])
        assert_is_figure(save["durable_seconds"])
