"""Files of a directory of checkpoints: where they are, and damage to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import asyncckpt


def manifest_path(root: Path, step: int, end: str = "json") -> Path:
    return root / "manifests" / f"{step:012d}.{end}"


def document_of(root: Path, step: int, end: str = "json") -> Any:
    return json.loads(manifest_path(root, step, end).read_text())


def flip_byte(path: Path, at: int = -1) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def stored_rows(path: Path, name: str = "user") -> dict[str, torch.Tensor]:
    """Return the columns of a table in the order of their ids."""
    found = asyncckpt.load(path, tables=True)[name]
    order = found["id"].argsort()
    return {column: values[order] for column, values in found.items()}
