"""A name that a file gives is looked up among what is loaded: nothing is imported for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.dcp.dcp_metadata import read_dcp_metadata
from asyncckpt.format import values
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.trainer_state.plain import from_plain
from tests.bad_input.crafted import Crafted

pytestmark = pytest.mark.any_core

NAMES = ["onnx", "_inductor", "_dynamo", "compiler", "export", "nn.functional", "__builtins__", "float99"]


def read_metadata(folder: Path, name: str) -> None:
    (folder / ".metadata").write_bytes(f"ctorch\n{name}\n.".encode())
    read_dcp_metadata(folder)


def read_manifest(folder: Path, name: str) -> None:
    """Of a block, and of a plain value."""
    asyncckpt.save(folder / "ckpt", {"w": torch.ones(4), "d": torch.float32}, 0)
    crafted = Crafted(folder / "ckpt", 0)
    document = crafted.document()
    document["blocks"][0]["dtype"] = name
    crafted.write(document)
    asyncckpt.load(folder / "ckpt")


WAYS: dict[str, Callable[[Path, str], Any]] = {
    "metadata of DCP": read_metadata,
    "manifest": read_manifest,
    "dtype": lambda folder, name: dtype_by_name(name, owner="block 'w'"),
    "value": lambda folder, name: values._dtype(name),
    "plain state": lambda folder, name: from_plain({"tensor": (name, (1,), b"1234")}),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_name_in_a_file_makes_torch_import_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """torch imports some modules when they are asked for by getattr; here it may not be asked at all."""
    asked: list[str] = []
    monkeypatch.setattr(torch, "__getattr__", lambda name: asked.append(name) or getattr(torch.Tensor, name))
    before = set(sys.modules)
    for number, name in enumerate(NAMES):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises((asyncckpt.CheckpointError, ValueError)):
            WAYS[way](folder, name)
    assert asked == []
    assert not {name for name in set(sys.modules) - before if name.startswith("torch.")}
