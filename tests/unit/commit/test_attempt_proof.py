"""Readers' code decodes a manifest before it is published: once for all manifests of one structure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.commit import attempt
from asyncckpt.model.block import LEAF_BYTES

DIM = 256


def test_tables_that_grow_by_leaves_keep_their_structure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    decode = attempt.decode_manifest

    def noted(raw: bytes, name: str) -> Any:
        decoded.append(name)
        return decode(raw, name)

    monkeypatch.setattr(attempt, "decode_manifest", noted)
    monkeypatch.setattr(attempt, "_proven", {})
    rows = LEAF_BYTES // (4 * DIM)
    table = asyncckpt.HashTable("t", DIM, capacity=5 * rows)
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}, tensors={"w": torch.ones(3)}) as saver:
        for step in range(4):
            table.insert(torch.arange(step * rows, (step + 1) * rows + 1), torch.full((rows + 1, DIM), float(step)))
            saver.save_async(step).result(60)
            asyncckpt.verify(tmp_path, step)
    assert len(decoded) == 1
