"""DCP on gloo ranks: FSDP2 and two-dimensional boxes, saved by 2, loaded by 1, 2 and 4; failures on single ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed.checkpoint as dcp

import asyncckpt
from asyncckpt.dcp import StorageReader
from tests.dcp.model import differences, image_of, make, put_back, state_of
from tests.ranks.processes import await_ranks, start_rank

pytestmark = pytest.mark.any_core

RUN_S_MAX = 120.0
BY_TWO = ("save_fsdp", "save_boxes", "save_alone_in_between", "fail")
BY_FOUR = ("load_fsdp", "load_boxes")


def run_ranks(world: int, scenarios: tuple[str, ...], folder: Path) -> list[dict[str, list[str]]]:
    """What every rank found. All scenarios share processes, whose imports take longest."""
    words = [(",".join(scenarios), rank, world, folder) for rank in range(world)]
    ended = await_ranks([start_rank("tests.dcp.rank", one, folder) for one in words], RUN_S_MAX - 10)
    return [_result(folder / f"found-{world}-{rank}.json", one.output) for rank, one in enumerate(ended)]


def _result(path: Path, output: str) -> dict[str, list[str]]:
    if path.exists():
        found: dict[str, list[str]] = json.loads(path.read_text())
        return found
    return {"": [f"a rank ended early: {output[-4000:]}"]}


def check(found: list[dict[str, list[str]]], scenario: str) -> None:
    for rank, problems in enumerate(found):
        said = problems.get(scenario, [f"not run, because of {list(problems.values())[-1]}"])
        assert said == [], f"rank {rank}: {said[:8]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def of_two(folder: Path) -> list[dict[str, list[str]]]:
    return run_ranks(2, BY_TWO, folder)


@pytest.fixture(scope="module")
def of_four(folder: Path, of_two: Any) -> list[dict[str, list[str]]]:
    return run_ranks(4, BY_FOUR, folder)


@pytest.mark.timeout(RUN_S_MAX)
@pytest.mark.parametrize("scenario", BY_TWO)
def test_two_ranks(of_two: list[dict[str, list[str]]], scenario: str) -> None:
    check(of_two, scenario)


@pytest.mark.slow
@pytest.mark.timeout(RUN_S_MAX)
@pytest.mark.parametrize("scenario", BY_FOUR)
def test_four_ranks_load_what_two_saved(of_four: list[dict[str, list[str]]], scenario: str) -> None:
    check(of_four, scenario)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("step", [0, 1])
def test_one_rank_loads_what_two_saved(folder: Path, of_two: Any, step: int) -> None:
    model, optimizer = make(seed=9)
    state = state_of(model, optimizer)
    path = folder / "save_fsdp" / "ckpt"
    dcp.load(state, storage_reader=StorageReader(path, step=step))
    put_back(model, optimizer, state)
    with np.load(folder / "save_fsdp" / f"image-{step}.npz") as expected:
        assert differences(image_of(state_of(model, optimizer)), dict(expected)) == []


def test_a_loader_loads_what_two_saved(folder: Path, of_two: Any) -> None:
    """Boxes are put together; plain values are those of rank 0."""
    model, _ = make(seed=9)
    targets = {"model": model, "epoch": -1, "who": {"rank": -1}}
    report = asyncckpt.Loader(folder / "save_fsdp" / "ckpt", tensors=targets, step=1, strict=False).load()
    assert report.missing == ()
    assert (report.values["epoch"], report.values["who.rank"]) == (1, 0)
    with np.load(folder / "save_fsdp" / "image-1.npz") as expected:
        wanted = {name: value for name, value in expected.items() if name.startswith(".model")}
    assert differences(image_of({"model": model.state_dict()}), wanted) == []


def test_a_checkpoint_of_two_ranks_is_sound(folder: Path, of_two: Any) -> None:
    path = folder / "save_fsdp" / "ckpt"
    assert asyncckpt.list_steps(path) == [0, 1]
    for step in (0, 1):
        assert asyncckpt.verify(path, step).strays == ()
    files = asyncckpt.describe(path, 1).files
    assert [Path(file).name for file in files] == ["r00000-000.safetensors", "r00001-000.safetensors"]
    assert {info.dtype for info in asyncckpt.describe(path, 1).blocks} == {"float32", "int64"}


def test_no_pickle_is_in_the_files_of_two_ranks(folder: Path, of_two: Any) -> None:
    paths = [path for path in (folder / "save_fsdp" / "ckpt").rglob("*") if path.is_file() and path.name != "LOCK"]
    assert len(paths) == 6
    for path in paths:
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        else:
            header = path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")]
            assert set(json.loads(header)) > {"__metadata__"}
        assert b"torch.distributed" not in path.read_bytes()
