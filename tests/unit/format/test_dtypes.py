"""Dtypes: what a manifest says of them is known without torch."""

from __future__ import annotations

import pytest
import torch

from asyncckpt.errors import UnsupportedError
from asyncckpt.format import dtypes


def test_bytes_of_elements_are_those_of_torch() -> None:
    found = {dtype: dtypes.stored_dtype(dtype, owner="x") for dtype in dtypes.supported_dtypes()}
    assert len(found) >= 20
    assert {dtype: entry.itemsize for dtype, entry in found.items()} == {dtype: dtype.itemsize for dtype in found}
    assert all(entry.dtype is dtype for dtype, entry in found.items())


def test_a_dtype_that_this_torch_lacks_is_known_and_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "_of_torch", lambda: {"float32": torch.float32})
    entry = dtypes.known_dtype("bits8")
    assert entry is not None
    assert entry.stored_itemsize == 1
    assert not dtypes.is_in_torch("bits8")
    with pytest.raises(UnsupportedError, match="'x' has a dtype that this version cannot read"):
        dtypes.dtype_by_name("bits8", owner="x")
    with pytest.raises(UnsupportedError, match="no dtype 'bits8'"):
        entry.dtype  # noqa: B018
