"""A checkpoint asks for more memory than there is: each door says so, whichever allocation it is that fails."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash

import asyncckpt
import asyncckpt.dcp
from asyncckpt import inspection
from asyncckpt.formats import hf, recis, torch_file
from asyncckpt.optim import SparseAdagrad
from tests.bad_input.crafted import Crafted
from tests.worlds.told import check_told

pytestmark = [pytest.mark.any_core, pytest.mark.filterwarnings("ignore:tables .* are left out:RuntimeWarning")]

SLOTS = SparseAdagrad.optimizer_slots()
ALLOCATIONS_MAX = 400
WANTED = re.compile(r"allocate .*\d|\d bytes.*:")
SIZE_MIN = 64  # Smaller ones are not by what a checkpoint says.


def table() -> asyncckpt.HashTable:
    return asyncckpt.HashTable("t", 3, optimizer_slots=SLOTS, capacity=1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full checkpoint and a delta, a file of torch.save, and a directory of RecIS."""
    root = tmp_path_factory.mktemp("saved")
    rows, net = table(), torch.nn.Linear(16, 8)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    state = {"net": net, "optimizer": optimizer, "array": np.arange(100)}
    with asyncckpt.Saver(
        path=root / "ckpt", hashtables={"t": rows}, tensors=state, deltas=asyncckpt.DeltaPolicy(bytes_share_max=9)
    ) as saver:
        for step in (1, 2):
            rows.insert(torch.arange(5000) * step, torch.ones(5000, 3))
            saver.save(step)
    torch.save({"x": torch.arange(100.0)}, root / "file.pt")
    asyncckpt.save(root / "plain", {"x": torch.ones(100)}, 1)
    recis.export_checkpoint(root / "plain", root / "recis")
    return root


def follow(path: Path) -> Callable[[], object]:
    served = table()

    async def loads() -> None:
        async with asyncckpt.follow(path, until=2, poll_seconds=0.01) as follower:
            async for update in follower:
                await update.load({"t": served})
                await update.rows("t")

    return lambda: asyncio.run(loads())


def load_objects(path: Path) -> Callable[[], object]:
    net = torch.nn.Linear(16, 8)
    state = {"net": net, "optimizer": torch.optim.Adam(net.parameters()), "array": np.zeros(100, dtype=np.int64)}
    return asyncckpt.Loader(path, hashtables={"t": table()}, tensors=state).load


def load_by_dcp(path: Path) -> Callable[[], object]:
    state = {"net": torch.nn.Linear(16, 8).half().state_dict()}

    def load() -> None:
        try:
            dcp.load(state, storage_reader=asyncckpt.dcp.StorageReader(path), no_dist=True)
        except dcp.api.CheckpointException as error:
            raise error.failures[0][0] from error

    return load


# From a folder of sources, and a place that is free, to what is called.
DOORS: dict[str, Callable[[Path, Path], Callable[[], object]]] = {
    "load": lambda root, new: lambda: asyncckpt.load(root / "ckpt", tables=True),
    "loader": lambda root, new: load_objects(root / "ckpt"),
    "follow": lambda root, new: follow(root / "ckpt"),
    "dcp": lambda root, new: load_by_dcp(root / "ckpt"),
    "verify": lambda root, new: lambda: asyncckpt.verify(root / "ckpt"),
    "find rows": lambda root, new: lambda: inspection.find_rows(root / "ckpt", "t", [4, 8]),
    "compare": lambda root, new: lambda: inspection.compare(root / "ckpt", 1, 2),
    "export hf": lambda root, new: lambda: hf.export_checkpoint(root / "ckpt", new),
    "export torch": lambda root, new: lambda: torch_file.export_checkpoint(root / "ckpt", new),
    "import torch": lambda root, new: lambda: torch_file.import_checkpoint(root / "file.pt", new),
    "read recis": lambda root, new: lambda: recis.CheckpointReader(root / "recis").read_tensor("x"),
}


class Allocations:
    """Counts what is allocated, and lets one fail as torch and NumPy do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.failing = 0, 0
        for module, far in ((torch, 2**46), (np, 2**50)):
            for name in ("empty", "zeros"):
                monkeypatch.setattr(module, name, self.counted(getattr(module, name), far))

    def counted(self, plain: Any, far: int) -> Any:
        def allocate(shape: Any, *more: Any, **options: Any) -> Any:
            sizes = shape if isinstance(shape, (tuple, list)) else (shape, *(n for n in more if isinstance(n, int)))
            if math.prod(map(int, sizes)) >= SIZE_MIN:
                self.count += 1
                if self.count == self.failing:
                    shape, more, options = far, (), {}
            return plain(shape, *more, **options)

        return allocate


@pytest.mark.parametrize("door", DOORS)
def test_each_allocation_that_fails_is_told_as_a_lack_of_memory(saved: Path, tmp_path: Path, door: str) -> None:
    told: list[asyncckpt.IOFailedError] = []
    for failing in range(1, ALLOCATIONS_MAX):
        call = DOORS[door](saved, tmp_path / str(failing))
        with pytest.MonkeyPatch.context() as monkeypatch:
            allocations = Allocations(monkeypatch)
            allocations.failing = failing
            try:
                call()
            except asyncckpt.IOFailedError as error:
                told.append(error)
        if allocations.count < failing:
            break
    else:
        pytest.fail("it allocates without end")
    assert {error.errno for error in told} == {errno.ENOMEM}
    for error in told:
        says, shown = ("not enough memory for", WANTED, "bytes are to spare"), {f"{saved}": "DIR", f"{tmp_path}": "NEW"}
        check_told(error, "memory", *says, re.compile(f"{saved}|{tmp_path}"), shown=shown)


def test_a_tensor_of_a_forged_size_is_named_with_its_bytes(tmp_path: Path) -> None:
    """In a sparse file of that size, which costs nothing."""
    asyncckpt.save(tmp_path, {"w": torch.ones(4)}, 0)
    crafted, count = Crafted(tmp_path, 0), 2**41
    document = crafted.document()
    file, block = document["files"][0], document["blocks"][0]
    path = tmp_path / file["path"]
    raw = path.read_bytes()[: file["header_bytes"]]
    header = json.loads(raw[8:])
    header["w"] |= {"shape": [count], "data_offsets": [0, 4 * count]}
    body = json.dumps(header, separators=(",", ":")).encode().ljust(len(raw) - 8)
    with path.open("wb") as shard:
        shard.write(struct.pack("<Q", len(body)) + body)
        try:
            shard.truncate(len(raw) + 4 * count)
        except OSError:
            pytest.skip("no files of that size here")
    file |= {
        "bytes": len(raw) + 4 * count,
        "header_digest": xxhash.xxh3_128_hexdigest(struct.pack("<Q", len(body)) + body),
    }
    block |= {"shape": [count], "bytes": 4 * count}
    block.pop("leaf_digests", None)
    crafted.write(document)
    with pytest.raises(asyncckpt.IOFailedError, match=f"not enough memory for tensor 'w', {4 * count} bytes") as told:
        asyncckpt.load(tmp_path)
    assert told.value.errno == errno.ENOMEM
