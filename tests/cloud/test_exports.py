"""Exports read a checkpoint from a store as they read it from a disk, and imports make one there; the other library's
side is on a disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.dcp import convert as dcp
from asyncckpt.formats import hf, parquet, recsdk, torch_file
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.storage.object_store import ObjectStore
from tests.cloud import seaweed
from tests.cloud.fault_proxy import FaultProxy, Mishap

pytestmark = pytest.mark.filterwarnings("ignore:.*left out")

TENSORS = {"weight": torch.arange(3000, dtype=torch.float32).reshape(3, 1000), "bias": torch.ones(7).bfloat16()}


def saved(path: Path, url: str) -> None:
    """Save a full checkpoint and a delta with a table and tensors, to a disk and a store."""
    table = asyncckpt.HashTable("user", 4)
    with asyncckpt.Saver(path=path, tensors=TENSORS, hashtables={"user": table}, upload=url) as saver:
        table.lookup(torch.arange(1000), insert=True)
        saver.save(0, kind="full")
        table.lookup(torch.arange(1000, 1010), insert=True)
        saver.save_async(1, kind="delta").wait_uploaded()


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asyncckpt", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def contents(path: Path) -> dict[str, bytes]:
    """Return all files below a folder, or the one that this is."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def test_exports_read_from_a_store(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", url)
    torch_file.export_checkpoint(url, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    for export in (hf.export_checkpoint, parquet.export_checkpoint, recsdk.export_checkpoint):
        there, here = tmp_path / f"{export.__module__}.store", tmp_path / f"{export.__module__}.disk"
        export(url, there)
        export(tmp_path / "ckpt", here)
        assert contents(there) == contents(here) != {}
    dcp.export_checkpoint(url, tmp_path / "dcp")
    dcp.import_checkpoint(tmp_path / "dcp", tmp_path / "back")
    back = asyncckpt.load(tmp_path / "back")
    assert all(torch.equal(back[name], tensor) for name, tensor in TENSORS.items())


def test_the_command_exports_from_a_store(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", url)
    for more in (["--dry-run"], []):
        ran = run("export", "hf", url, tmp_path / "hf", "--step", "0", *more)
        assert (ran.returncode, (tmp_path / "hf").exists()) == (0, not more), ran.stderr
    refused = run("import", "hf", url, tmp_path / "other")
    assert (refused.returncode, "path is a URL" in refused.stderr) == (2, True)
    assert not (tmp_path / "other").exists()
    refused = run("export", "hf", url, f"{url}/hf")
    assert (refused.returncode, "path is a URL" in refused.stderr) == (2, True)
    assert not Path("s3:").exists()


def test_imports_make_steps_in_a_store(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", f"{url}/uploaded")
    dcp.export_checkpoint(tmp_path / "ckpt", tmp_path / "dcp")
    torch_file.export_checkpoint(tmp_path / "ckpt", tmp_path / "state.pt")
    recsdk.export_checkpoint(tmp_path / "ckpt", tmp_path / "recsdk")
    hf.export_checkpoint(tmp_path / "ckpt", tmp_path / "hf")
    place = f"{url}/imported"
    assert dcp.import_checkpoint(tmp_path / "dcp", place) == 0
    results = [
        torch_file.import_checkpoint(tmp_path / "state.pt", place),
        hf.import_checkpoint(tmp_path / "hf", place, step=2),
        recsdk.import_checkpoint(tmp_path / "recsdk", place),
    ]
    assert [(result.step, str(result.path)) for result in results] == [(1, place), (2, place), (3, place)]
    for step in range(3):
        loaded = asyncckpt.load(place, step=step)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    table = asyncckpt.HashTable("user", 4)
    asyncckpt.Loader(place, {"user": table}, step=3).load()
    assert len(table) == 1010
    with pytest.raises(asyncckpt.ConflictError, match=r"step 2 .*already exists"):
        hf.import_checkpoint(tmp_path / "hf", place, step=2)


def test_the_command_imports_into_a_store(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", f"{url}/uploaded")
    hf.export_checkpoint(tmp_path / "ckpt", tmp_path / "hf")
    for more in (["--dry-run"], []):
        ran = run("import", "hf", tmp_path / "hf", f"{url}/imported", "--step", "7", *more)
        assert ran.returncode == 0, ran.stderr
        objects = ObjectStore(StoreUrl.of(f"{url}/imported")).below("")
        assert bool(objects) is not bool(more)
    assert asyncckpt.list_steps(f"{url}/imported") == [7]
    refused = run("import", "hf", tmp_path / "hf", f"{url}/imported", "--step", "7")
    assert (refused.returncode, "already exists" in refused.stderr) == (6, True)


def test_an_import_that_fails_leaves_nothing(proxy: FaultProxy, url: str, tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", f"{url}/uploaded")
    hf.export_checkpoint(tmp_path / "ckpt", tmp_path / "hf")
    proxy.fault = lambda request: Mishap(answer=(403, "AccessDenied")) if "safetensors" in request.path else None
    with pytest.raises(asyncckpt.IOFailedError, match="AccessDenied"):
        hf.import_checkpoint(tmp_path / "hf", f"{url}/imported")
    proxy.fault = lambda request: None
    assert asyncckpt.list_steps(f"{url}/imported") == []
    assert not ObjectStore(StoreUrl.of(f"{url}/imported")).below("data")


def test_what_ends_an_export_from_a_store_leaves_nothing(proxy: FaultProxy, url: str, tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", url)
    proxy.fault = lambda request: Mishap(answer=(403, "AccessDenied")) if "safetensors" in request.path else None
    with pytest.raises(asyncckpt.IOFailedError, match="AccessDenied"):
        hf.export_checkpoint(url, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
