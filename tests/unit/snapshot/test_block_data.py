"""The source of a dense tensor gives its bytes, whatever its strides and whichever range of them is asked for."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from asyncckpt.model.source import as_bytes
from asyncckpt.snapshot.block_data import tensor_source
from asyncckpt.trainer_state.plain import to_plain
from tests.worlds.bits import raw_of

ODD = {
    "plain": torch.arange(7, dtype=torch.int32),
    "strided": torch.arange(14, dtype=torch.int32)[::2],
    "one number": torch.arange(2, dtype=torch.int32)[::2],
    "one number in three dimensions": torch.arange(8.0).reshape(2, 2, 2)[::2, ::2, ::2],
    "one row": torch.arange(12, dtype=torch.int64).reshape(6, 2)[::6],
    "one column": torch.arange(12.0).reshape(6, 2)[:, ::2],
    "transposed": torch.arange(12, dtype=torch.float64).reshape(3, 4).t(),
    "conjugated": torch.randn(5, dtype=torch.complex64).conj(),
    "negative": torch._neg_view(torch.arange(3.0)),
    "expanded": torch.ones(1, 2).expand(3, 2),
    "number": torch.tensor(3.0),
    "empty": torch.arange(4.0)[4:],
    "empty and expanded": torch.ones(1, 0).expand(3, 0),
}


@pytest.mark.parametrize("name", ODD)
def test_every_range_of_bytes(name: str) -> None:
    tensor, whole = ODD[name], raw_of(ODD[name])
    for begin, end in itertools.combinations(range(len(whole) + 1), 2):
        source = tensor_source(tensor, "x")
        found = b"".join(ctypes.string_at(int(at), int(size)) for at, size in source.pieces(begin, end))
        source.release()
        assert found == whole[begin:end]


@pytest.mark.parametrize("name", ODD)
def test_bytes_of_what_torch_calls_contiguous(name: str) -> None:
    tensor = ODD[name].resolve_conj().resolve_neg().contiguous()
    assert as_bytes(tensor).tobytes() == raw_of(tensor)
    assert to_plain(tensor)["tensor"][2] == raw_of(tensor)
