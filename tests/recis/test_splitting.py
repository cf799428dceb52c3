"""RecIS' split of a state dict gives a Saver its tables and its tensors, each once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.formats import recis
from tests.recis.handmade import user_rows
from tests.recis.test_loading import make_table
from tests.recis.test_writing import filled


def test_a_mapping_is_split_and_stays_as_it_is(tmp_path: Path) -> None:
    rows = user_rows(50)
    state = {"weight": torch.ones(3), "user": filled(rows), "step": 5}
    before = dict(state)
    tables, dense = recis.split_sparse_dense_state_dict(state)
    assert state == before
    assert (list(tables), list(dense)) == (["user"], ["weight", "step"])
    with asyncckpt.Saver(0, 1, 8, tmp_path, tables, dense) as saver:
        assert saver.save(1).rows_count == 50
    target, weight = make_table(), torch.zeros(3)
    asyncckpt.Loader(tmp_path, *recis.split_sparse_dense_state_dict({"user": target, "weight": weight})).load()
    assert len(target) == 50
    assert weight.tolist() == [1, 1, 1]


def test_a_module_is_split_into_its_tables_and_live_tensors() -> None:
    table = make_table()
    model = torch.nn.ModuleDict({"users": asyncckpt.nn.HashEmbedding(table), "dense": torch.nn.Linear(4, 2)})
    tables, dense = recis.split_sparse_dense_state_dict(model)
    assert tables == {"users": table}
    assert list(dense) == ["dense.weight", "dense.bias"]
    assert dense["dense.weight"].data_ptr() == model["dense"].weight.data_ptr()


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(asyncckpt.UsageError, match="state is neither a mapping nor a module"):
        recis.split_sparse_dense_state_dict([torch.ones(1)])
