"""Manifests that say anything of memory that tensors share: a load gives what their blocks hold, or CorruptError."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from crafted import Crafted, Document

import asyncckpt
from asyncckpt.plan.leaf_memory import BLOW_UP_BYTES_MAX

BIG = [1 << 20, 1 << 33, 1 << 40, 1 << 46, (1 << 53) - 1]


def saved(path: Path) -> tuple[Crafted, Mapping[str, torch.Tensor]]:
    base, other = torch.arange(100.0), torch.ones(100)
    state = {
        "a": base,
        "b": base,
        "c": base[10:20],
        "v": base[::2],
        "e": base[:0],
        "r": base[3:4].expand(5),
        "z": other,
    }
    asyncckpt.save(path, state)
    return Crafted(root=path, step=0), state


def check(small: Crafted, state: Mapping[str, torch.Tensor]) -> bool:
    """Load; return whether it was refused."""
    try:
        found = asyncckpt.load(small.root)
    except asyncckpt.CorruptError:
        return True
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].untyped_storage().nbytes() <= BLOW_UP_BYTES_MAX + 4096
    return False


def views(document: Document) -> list[dict[str, Any]]:
    return [view for memory in document["shared"] for view in memory["views"]]


def test_whatever_is_said_of_memory_the_values_are_those_of_the_blocks(tmp_path: Path) -> None:
    small, state = saved(tmp_path / "d")
    assert not check(small, state)
    raw, draw = small.raw(), random.Random(5)

    def change(document: Document) -> None:
        for _ in range(draw.randrange(1, 4)):
            view = draw.choice(views(document))
            kind = draw.randrange(5)
            if kind == 0:
                document["shared"][0]["bytes"] = draw.choice([0, 8, 396, 400, 404, *BIG])
            elif kind == 1:
                view["offset"] = draw.choice([0, 2, 4, 40, 360, *BIG])
            elif kind == 2:
                view["strides"] = draw.choice([[], [0], [1], [2], [1, 1], [BIG[0]], [BIG[2]]])
            elif kind == 3:
                free = {*range(len(state))} - {item["leaf"] for item in [*views(document), *document["tied"]]}
                view["leaf"] = draw.choice([view["leaf"], *sorted(free)])
            else:
                one, other = draw.sample(views(document), 2)
                one["offset"], other["offset"] = other["offset"], one["offset"]

    refused = 0
    for _ in range(120):
        small.write_raw(raw)
        small.edit(change)
        refused += check(small, state)
    assert 20 < refused < 100


@pytest.mark.parametrize("bytes", BIG)
def test_memory_that_is_far_too_large_is_not_taken(tmp_path: Path, bytes: int) -> None:
    small, state = saved(tmp_path / "d")

    def change(document: Document) -> None:
        document["shared"][0]["bytes"] = bytes
        views(document)[0]["offset"] = bytes // 4 * 4 - 800

    small.edit(lambda document: document["shared"][0].update(bytes=bytes))
    assert not check(small, state)
    small.edit(change)
    assert not check(small, state)
