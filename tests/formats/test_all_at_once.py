"""An export is there all at once and as it was meant, or not at all."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
import asyncckpt.dcp
from asyncckpt.commit.new_entry import NewEntry
from asyncckpt.errors import ConflictError, CorruptError
from asyncckpt.formats import hf, parquet, recsdk, torch_file
from tests.worlds.failing_calls import fail_in_turn

pytestmark = pytest.mark.filterwarnings("ignore:(tables|tensors) .* are left out")

Export = Callable[[Path, Path], Any]
EXPORTS: dict[str, Export] = {
    "torch": torch_file.export_checkpoint,
    "dcp": asyncckpt.dcp.export_checkpoint,
    "hf": lambda path, target: hf.export_checkpoint(path, target, shard_size=1),
    "recsdk": lambda path, target: recsdk.export_checkpoint(path, target, shards=1),
}


if importlib.util.find_spec("pyarrow") is not None:
    EXPORTS["parquet"] = parquet.export_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    table = asyncckpt.HashTable("user", 2)
    table.insert(torch.arange(5), torch.ones(5, 2))
    asyncckpt.save(tmp_path / "run", {"x": torch.ones(10), "y": torch.ones(10)}, hashtables={"user": table})
    return tmp_path / "run"


def left_beside(run: Path) -> list[str]:
    return [path.name for path in run.parent.iterdir() if path != run]


@pytest.mark.parametrize("kind", EXPORTS)
@pytest.mark.parametrize("call", ["open", "mkdir", "fsync", "ftruncate"])
def test_a_failing_operation_leaves_nothing(kind: str, call: str, run: Path, tmp_path: Path) -> None:
    failing = fail_in_turn(call, lambda: EXPORTS[kind](run, tmp_path / "out"), tmp_path / "out", run)
    never = {("torch", "mkdir"), ("torch", "ftruncate"), ("dcp", "ftruncate"), ("parquet", "ftruncate")}
    assert failing > 0 or (kind, call) in never


@pytest.mark.parametrize("kind", ["dcp", "hf"])
def test_what_is_not_read_back_as_written_is_not_published(
    kind: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(self: Any, folder: Any) -> None:
        for path in [*folder.path.glob("*.distcp"), *folder.path.glob("*.safetensors")]:
            raw = path.read_bytes()
            ones = torch.ones(10).numpy().tobytes()
            assert ones in raw
            path.write_bytes(raw.replace(ones, bytes(len(ones))))

    monkeypatch.setattr("asyncckpt.commit.new_entry.NewEntry._sync", damage)
    with pytest.raises(CorruptError, match="not read back as it was written"):
        EXPORTS[kind](run, tmp_path / "out")
    assert left_beside(run) == []


@pytest.mark.parametrize("kind", EXPORTS)
def test_a_name_that_is_taken_is_left_alone(kind: str, run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConflictError, match="already exists"):
        EXPORTS[kind](run, tmp_path / "out")
    assert left_beside(run) == ["out"]
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("call", ["give_name", "_rename"])
@pytest.mark.parametrize("kind", EXPORTS)
def test_a_folder_that_is_moved_meanwhile_is_noticed(
    kind: str, call: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is done says that it is there by the name that was asked for."""
    real = getattr(NewEntry, call)

    def move(self: NewEntry, *arguments: Any) -> Any:
        (tmp_path / "folder").rename(tmp_path / "moved")
        return real(self, *arguments)

    monkeypatch.setattr(NewEntry, call, move)
    with pytest.raises(ConflictError, match="was moved or replaced while 'out' was made in it"):
        EXPORTS[kind](run, tmp_path / "folder" / "out")
    assert (tmp_path / "moved" / "out").exists() == (call == "_rename")


@pytest.mark.parametrize("kind", EXPORTS)
def test_a_source_that_is_not_there_makes_no_folders(kind: str, tmp_path: Path) -> None:
    with pytest.raises(asyncckpt.NotFoundError):
        EXPORTS[kind](tmp_path / "run", tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
