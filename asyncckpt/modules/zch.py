"""What a managed collision (ZCH) module needs besides its buffers to resume exactly.

An MCHManagedCollisionModule maps raw ids to rows. The map and its metadata (`_mch_sorted_raw_ids`,
`_mch_remapped_ids_mapping`, `_mch_<metadata>`, `_output_segments_tensor`, `_current_iter_tensor`) are persistent
buffers, which dense_state_of saves like those of any module, in the same cut as the rows. Between two evictions, a
module also collects a history of ids, in memory that is allocated at the first batch and is in no state dict: without
it, a module would evict other ids, and count the eviction interval from the load.

A HashZchManagedCollisionModule has no such memory: its identities and metadata are a parameter and a buffer.

Attributes used, per torchrec 1.8.0: _current_iter, _last_eviction_iter, _input_history_buffer_size,
_current_history_buffer_offset, _history_accumulator, _history_metadata, _eviction_policy.metadata_info, _evicted,
_evicted_emb_indices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asyncckpt.errors import IncompatibleError

MCH_KINDS = frozenset(("torchrec.modules.mc_modules.MCHManagedCollisionModule",))

RAW_IDS = "raw_ids"
EVICTED_ROWS = "evicted_rows"
_COUNTS = ("current_iter", "last_eviction_iter", "buffer_size")


class ZchHistory:
    """The history of one MCHManagedCollisionModule, as an object with a state dict."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        """Return counts, and the filled part of the history: int64 [n] each, views of the live memory."""
        module = self._module
        state: dict[str, Any] = {
            "current_iter": int(module._current_iter),
            "last_eviction_iter": int(module._last_eviction_iter),
            "buffer_size": int(module._input_history_buffer_size),
        }
        if state["buffer_size"] >= 0:
            count = int(module._current_history_buffer_offset)
            state[RAW_IDS] = module._history_accumulator[:count]
            state["metadata"] = {name: buffer[:count] for name, buffer in module._history_metadata.items()}
        if module._evicted:
            state[EVICTED_ROWS] = module._evicted_emb_indices
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a history into new memory. Raises IncompatibleError before anything is changed."""
        module = self._module
        if not all(type(state.get(name)) is int for name in _COUNTS):
            what = "history of a managed collision module lacks a count"
            raise IncompatibleError(what, found=sorted(state), expected=_COUNTS)
        current_iter, last_eviction_iter, size = (int(state[name]) for name in _COUNTS)
        columns = {**({RAW_IDS: state[RAW_IDS]} if RAW_IDS in state else {}), **state.get("metadata", {})}
        if size >= 0:
            self._check(columns, size=size)
            self._make_memory(columns, size=size)
        module._current_iter, module._last_eviction_iter = current_iter, last_eviction_iter
        module._input_history_buffer_size = size
        module._current_history_buffer_offset = len(columns[RAW_IDS]) if size >= 0 else 0
        module._evicted = EVICTED_ROWS in state
        if module._evicted:
            module._evicted_emb_indices = state[EVICTED_ROWS].to(module.device)

    def _check(self, columns: Mapping[str, Any], *, size: int) -> None:
        wanted = {RAW_IDS, *(info.metadata_name for info in self._history_infos())}
        if columns.keys() != wanted:
            what = "history of a managed collision module belongs to another eviction policy"
            raise IncompatibleError(what, found=sorted(columns), expected=sorted(wanted))
        shapes = {tuple(column.shape) for column in columns.values()}
        if len(shapes) != 1 or any(len(shape) != 1 or shape[0] > size for shape in shapes):
            what = "history of a managed collision module has columns of different lengths"
            raise IncompatibleError(what, found=sorted(shapes), expected=f"one length, at most {size}")

    def _make_memory(self, columns: Mapping[str, torch.Tensor], *, size: int) -> None:
        module = self._module
        module._history_accumulator = self._grown(columns[RAW_IDS], size=size)
        for info in self._history_infos():
            buffer = self._grown(columns[info.metadata_name], size=size)
            module.register_buffer(f"_history_{info.metadata_name}", buffer, persistent=False)
            module._history_metadata[info.metadata_name] = buffer

    def _grown(self, column: torch.Tensor, *, size: int) -> torch.Tensor:
        buffer = torch.zeros(size, dtype=torch.int64, device=self._module.device)
        buffer[: len(column)] = column.to(buffer.device)
        return buffer

    def _history_infos(self) -> list[Any]:
        return [info for info in self._module._eviction_policy.metadata_info if info.is_history_metadata]
