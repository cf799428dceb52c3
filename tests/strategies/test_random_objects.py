"""Whatever Megatron may keep in objects comes back bit for bit: values, arrays, NumPy scalars, and tensors that are
there several times, in one object or in several, also when tensors were removed from beside them.
"""

from __future__ import annotations

import argparse
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.strategies import CommonLoad, CommonSave, ShardedLoad, ShardedSave
from asyncckpt.strategies.mapping import ShardedObject, ShardedTensor
from tests.shares import slow_but_for_a_share

pytestmark = pytest.mark.any_core
SCALARS = (
    np.float64(1.5),
    np.float32(-2.5),
    np.float16(0.5),
    np.int64(7),
    np.uint8(200),
    np.bool_(True),
    np.complex64(1j),
)


class DrawnObjects:
    """Random objects over a few tensors, some of which are views of others."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        base = torch.arange(24.0).reshape(4, 6) + seed
        self.tensors = [base, base, base[1], base.T, torch.tensor(3, dtype=torch.int16), torch.empty(0)]

    def value(self, depth: int = 0) -> Any:
        pick = self.random.choice
        kind = pick(["tensor", "tensor", "scalar", "array", "plain", "dict", "list", "tuple", "ordered", "namespace"])
        if kind == "tensor" or (depth > 3 and kind in ("dict", "list", "tuple", "ordered", "namespace")):
            return pick(self.tensors)
        if kind == "scalar":
            return pick(SCALARS)
        if kind == "array":
            return pick([self.tensors[0].numpy(), np.arange(3), np.float32([[1, 2]])])
        if kind == "plain":
            return pick(
                [None, True, -5, 2**70, 0.1, "text", b"x" * 300, torch.float16, torch.Size([2]), {1, 2}, range(3)]
            )
        items = [self.value(depth + 1) for _ in range(self.random.randrange(4))]
        pairs = {f"k{number}": item for number, item in enumerate(items)}
        made = {"list": items, "tuple": tuple(items), "dict": pairs, "ordered": OrderedDict(pairs)}
        return argparse.Namespace(**pairs) if kind == "namespace" else made[kind]


def check_same(found: Any, expected: Any, at: str = "") -> None:
    assert type(found) is type(expected), at
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, at
        assert torch.equal(found, expected), at
    elif isinstance(expected, (np.ndarray, np.generic)):
        assert found.dtype == expected.dtype, at
        assert found.tobytes() == expected.tobytes(), at
    elif isinstance(expected, argparse.Namespace):
        check_same(vars(found), vars(expected), at)
    elif isinstance(expected, dict):
        assert list(found) == list(expected), at
        for key in expected:
            check_same(found[key], expected[key], f"{at}.{key}")
    elif isinstance(expected, (list, tuple)) and type(expected) is not torch.Size:
        assert len(found) == len(expected), at
        for number, item in enumerate(expected):
            check_same(found[number], item, f"{at}.{number}")
    else:
        assert found == expected, at


@pytest.mark.parametrize("seed", slow_but_for_a_share(range(30), "random sharded objects", every=3))
def test_objects_come_back(seed: int, tmp_path: Path) -> None:
    drawn = DrawnObjects(seed)
    objects = {f"o{number}": drawn.value() for number in range(4)}
    state: dict[str, Any] = {name: ShardedObject(name, item, (1,), (0,)) for name, item in objects.items()}
    state["w"] = ShardedTensor.from_rank_offsets("w", torch.ones(3))
    ShardedSave().save(state, tmp_path)
    wanted = {name: ShardedObject(name, None, (1,), (0,)) for name in objects}
    check_same(ShardedLoad().load(wanted, tmp_path), objects)
    ShardedLoad().remove_sharded_tensors(tmp_path, "w")
    check_same(ShardedLoad().load(wanted, tmp_path), objects)
    asyncckpt.verify(tmp_path / "sharded")
    common = {"all": drawn.value(), "some": [drawn.value() for _ in range(3)]}
    CommonSave().save_common(common, tmp_path)
    check_same(CommonLoad().load_common(tmp_path), common)
