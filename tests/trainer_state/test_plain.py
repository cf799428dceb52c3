"""Tensors and arrays inside state dicts become plain values, and come back as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.format.values import decode_value, encode_value
from asyncckpt.trainer_state.plain import from_plain, to_plain

pytestmark = pytest.mark.any_core

TENSORS = [
    torch.arange(6).reshape(2, 3),
    torch.arange(6.0).reshape(2, 3).t(),
    torch.tensor(1.5, dtype=torch.bfloat16),
    torch.tensor([float("nan"), -0.0], dtype=torch.float64),
    torch.tensor([True, False]),
    torch.zeros(0, 3, dtype=torch.int8),
    torch.tensor([1 + 2j]),
    torch.tensor([1 + 2j]).conj(),
    torch.tensor([1 + 2j]).conj().imag,
]


@pytest.mark.parametrize("tensor", TENSORS, ids=str)
def test_tensors(tensor: torch.Tensor) -> None:
    plain = decode_value(encode_value(to_plain({"a": [tensor]}), owner="x"), owner="x")
    (back,) = from_plain(plain)["a"]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    plain_memory = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    assert torch.equal(back.reshape(-1).view(torch.uint8), plain_memory.reshape(-1).view(torch.uint8))
    if back.numel():
        back.zero_()  # In memory of its own, and writable.


@pytest.mark.parametrize(
    "array", [np.arange(4, dtype=np.uint64), np.float32(2.5), np.zeros((0, 2)), np.array(["ab", "c"]), np.int64(-3)]
)
def test_arrays(array: Any) -> None:
    back = from_plain(to_plain((array, None)))[0]
    assert type(back) is type(array)
    assert (back.dtype, back.tolist()) == (array.dtype, array.tolist())


def test_containers_keep_their_types() -> None:
    value = {"tensor": 1, 2: [(), {}, {"dict": (b"x", "y", 2.5, True, None)}]}
    assert from_plain(to_plain(value)) == value


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": 1, "b": 2},
        {"dict": 3},
        {"tensor": ("float32", (2,), b"1234")},
        {"tensor": ("nn", (1,), b"1234")},
        {"tensor": ("nothing", (1,), b"1234")},
        {"array": ("O", (1,), b"12345678")},
        {"array": ("<f4", (1,), b"12345678")},
        {"array": 3},
        {"other": (1, 2, 3)},
    ],
    ids=str,
)
def test_what_was_not_made_so_is_refused(value: Any) -> None:
    with pytest.raises(asyncckpt.IncompatibleError, match="value of no known form"):
        from_plain(value)
