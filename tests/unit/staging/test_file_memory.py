"""Tensors in a file without a name: each with a storage of its own, for as long as it lives."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from asyncckpt import system
from asyncckpt.errors import IOFailedError
from asyncckpt.staging import file_memory
from asyncckpt.staging.file_memory import FileMemory


def open_file(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    path.unlink()
    return fd


def test_tensors_keep_what_is_written_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_memory, "REGION_BYTES", 1 << 16)
    wanted = [torch.randn(n, 100, dtype=dtype) for n in (0, 1, 300, 2) for dtype in (torch.float64, torch.bfloat16)]
    with FileMemory(open_file(tmp_path / "memory")) as memory:
        made = [memory.empty(tensor.shape, tensor.dtype).copy_(tensor) for tensor in wanted]
        scalar = memory.empty((), torch.int8).fill_(7)
    assert all(torch.equal(*pair) for pair in zip(made, wanted, strict=True))
    assert int(scalar) == 7
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in made)
    places = [tensor.data_ptr() for tensor in made if tensor.numel()]
    assert len(set(places)) == len(places)
    assert all(place % file_memory.ALIGNMENT == 0 for place in places)
    assert list(tmp_path.iterdir()) == []


def test_without_a_file_tensors_take_memory() -> None:
    with FileMemory(None) as memory:
        assert torch.equal(memory.empty((3,), torch.int16).fill_(2), torch.full((3,), 2, dtype=torch.int16))


def test_a_full_disk_is_an_error_before_memory_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(system, "take_room", full)
    with FileMemory(open_file(tmp_path / "memory")) as memory, pytest.raises(IOFailedError, match="No space left"):
        memory.empty((3,), torch.float32)


def test_many_large_tensors_take_few_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_memory, "REGION_BYTES", 1 << 16)
    mapped: list[int] = []
    taken = FileMemory._take
    monkeypatch.setattr(FileMemory, "_take", lambda self, size: mapped.append(size) or taken(self, size))
    with FileMemory(open_file(tmp_path / "memory")) as memory:
        made = [memory.empty((1 << 15,), torch.float32).fill_(index) for index in range(300)]
    assert all(bool((tensor == index).all()) for index, tensor in enumerate(made))
    assert len(mapped) < 50
    assert sum(mapped) < 1.2 * sum(tensor.nbytes for tensor in made)
