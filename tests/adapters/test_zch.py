"""The history of a managed collision module, by its recorded shape; tests/torchrec runs the real one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import asyncckpt
from asyncckpt.adapters import dense_state_of
from asyncckpt.errors import IncompatibleError
from asyncckpt.modules.zch import MCH_KINDS, ZchHistory
from tests.worlds.bits import bits

ROWS = 6


class Info(NamedTuple):
    metadata_name: str
    is_mch_metadata: bool
    is_history_metadata: bool


class FakeMch(nn.Module):
    """MCHManagedCollisionModule between two evictions: a map in buffers, a history made at the first batch."""

    def __init__(self, *metadata: str) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self._eviction_policy = type("Policy", (), {})()
        self._eviction_policy.metadata_info = [
            Info("counts", True, False),
            *(Info(name, True, True) for name in metadata),
        ]
        self.register_buffer("_mch_sorted_raw_ids", torch.full((ROWS,), torch.iinfo(torch.int64).max))
        self.register_buffer("_current_iter_tensor", torch.zeros(1, dtype=torch.int64))
        self._current_iter = -1
        self._last_eviction_iter = -1
        self._input_history_buffer_size = -1
        self._current_history_buffer_offset = 0
        self._history_metadata: dict[str, torch.Tensor] = {}
        self._evicted = False
        self._evicted_emb_indices = torch.empty((1,))

    def profile(self, raw_ids: torch.Tensor) -> None:
        if self._current_iter == -1:
            self._current_iter = self._last_eviction_iter = int(self._current_iter_tensor.item())
        self._current_iter += 1
        self._current_iter_tensor += 1
        if self._input_history_buffer_size == -1:
            self._input_history_buffer_size = 4 * len(raw_ids)
            self._history_accumulator = torch.full((self._input_history_buffer_size,), -99)
            for info in self._eviction_policy.metadata_info:
                if info.is_history_metadata:
                    buffer = torch.zeros(self._input_history_buffer_size, dtype=torch.int64)
                    self.register_buffer(f"_history_{info.metadata_name}", buffer, persistent=False)
                    self._history_metadata[info.metadata_name] = buffer
        here = slice(self._current_history_buffer_offset, self._current_history_buffer_offset + len(raw_ids))
        self._history_accumulator[here] = raw_ids
        for buffer in self._history_metadata.values():
            buffer[here] = self._current_iter
        self._current_history_buffer_offset += len(raw_ids)
        self._mch_sorted_raw_ids[: len(raw_ids)] = raw_ids.sort().values

    def image(self) -> Any:
        count = self._current_history_buffer_offset
        history = [getattr(self, "_history_accumulator", torch.zeros(0))[:count]]
        history += [getattr(self, f"_history_{name}")[:count] for name in self._history_metadata]
        counts = (self._current_iter, self._last_eviction_iter, self._input_history_buffer_size, count, self._evicted)
        return bits([dict(self.state_dict()), history, counts, self._evicted_emb_indices if self._evicted else None])


(_kind,) = MCH_KINDS
FakeMch.__module__, FakeMch.__qualname__ = _kind.rpartition(".")[0], _kind.rpartition(".")[2]


def make(*metadata: str) -> nn.ModuleDict:
    return nn.ModuleDict({"mc": nn.ModuleDict({"t1": FakeMch(*metadata)}), "over": nn.Linear(2, 1)})


def saved(model: nn.Module, path: Path) -> None:
    with asyncckpt.Saver(path=path, tensors={"model": dense_state_of(model)}) as saver:
        saver.save_async(1).result(60)


def load(model: nn.Module, path: Path) -> Mapping[str, Any]:
    return asyncckpt.Loader(path, tensors={"model": dense_state_of(model)}).load().values


@pytest.mark.parametrize("metadata", [(), ("last_access_iter",)], ids=["lfu", "lru"])
@pytest.mark.parametrize("batches", [0, 1, 3])
@pytest.mark.parametrize("evicted", [False, True])
def test_history_and_map_are_saved_together(
    tmp_path: Path, metadata: tuple[str, ...], batches: int, evicted: bool
) -> None:
    model, fresh = make(*metadata), make(*metadata)
    mch = model["mc"]["t1"]
    for step in range(batches):
        mch.profile(torch.tensor([step, 7, 5 * step]))
    if evicted:
        mch._evicted, mch._evicted_emb_indices = True, torch.tensor([2, 4])
    saved(model, tmp_path)
    load(fresh, tmp_path)
    assert fresh["mc"]["t1"].image() == mch.image()
    for module in (mch, fresh["mc"]["t1"]):
        module.profile(torch.tensor([1, 2, 3]))
    assert fresh["mc"]["t1"].image() == mch.image()


def test_memory_that_nothing_was_written_to_is_not_saved() -> None:
    model = make()
    model["mc"]["t1"].profile(torch.tensor([1, 2, 3]))
    history = dense_state_of(model).state_dict()["zch"]["mc.t1"]
    assert history["raw_ids"].tolist() == [1, 2, 3]
    assert history["raw_ids"].data_ptr() == model["mc"]["t1"]._history_accumulator.data_ptr()


def test_a_used_module_takes_another_history(tmp_path: Path) -> None:
    model, other = make("last_access_iter"), make("last_access_iter")
    model["mc"]["t1"].profile(torch.tensor([1, 2, 3]))
    for _ in range(4):
        other["mc"]["t1"].profile(torch.tensor([8, 9]))
    saved(model, tmp_path)
    load(other, tmp_path)
    assert other["mc"]["t1"].image() == model["mc"]["t1"].image()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("buffer_size"), "lacks a count"),
        (lambda state: state.update(current_iter=None), "lacks a count"),
        (lambda state: state.pop("raw_ids"), "to another eviction policy"),
        (lambda state: state["metadata"].clear(), "to another eviction policy"),
        (lambda state: state["metadata"].update(x=state["raw_ids"]), "to another eviction policy"),
        (lambda state: state.update(raw_ids=state["raw_ids"][:2]), "columns of different lengths"),
        (lambda state: state.update(buffer_size=2), "columns of different lengths"),
    ],
)
def test_a_history_that_does_not_fit_changes_nothing(change: Any, message: str) -> None:
    source, target = FakeMch("last_access_iter"), FakeMch("last_access_iter")
    source.profile(torch.tensor([1, 2, 3]))
    state = ZchHistory(source).state_dict()
    change(state)
    before = target.image()
    with pytest.raises(IncompatibleError, match=message):
        ZchHistory(target).load_state_dict(state)
    assert target.image() == before
