"""Marks for tables of FBGEMM and TorchRec, by hooks on the lookups of a TBE; see track_lookups.py.

A TBE with a fused optimizer writes rows in its backward, and only those that its forward looked up:

1. A hook after the forward computes the rows of the batch from `indices` and `offsets`, and marks them.
2. If there is a save between forward and backward, as with pipelined batches, a hook on the gradient of the forward's
   output marks them again, just before the backward writes.

Marks are collected in one mask per TBE, on the device of its indices, without waiting for it; the next cut reads it
(row_mask.py). On a GPU, that cut makes the host wait until the device has executed the last mark, which is after the
last forward of the TBE, perhaps before its backward. A save of tables without marks does not wait, but copies all rows.

A load, by asyncckpt or with load_state_dict, counts as a change of all rows. So does every other write that torch
counts, for FBGEMM's kernels move no version counter: the load_state_dict of a fused optimizer above all, which copies
into the states' memory and calls no hook. What torch does not count is not seen.

Source of the interface: fbgemm_gpu 1.8.0, detected by attributes, without importing it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from asyncckpt.adapters.row_mask import RowMask, row_mask
from asyncckpt.modules.fixed_table import FixedMarks
from asyncckpt.signals import Guard
from asyncckpt.tables.row_device import sent

BATCH_SIZES = "batch_size_per_feature_per_rank"
FORWARD_ARGUMENTS = ("indices", "offsets", "per_sample_weights", "feature_requires_grad", BATCH_SIZES)

_tracked: weakref.WeakKeyDictionary[torch.nn.Module, TbeMarks] = weakref.WeakKeyDictionary()


def marks_of_table(tbe: torch.nn.Module, index: int) -> FixedMarks | None:
    """Return the marks of a table of a TBE while its lookups are tracked."""
    found = _tracked.get(tbe)
    return None if found is None else found.tables.get(index)


def is_tracked(tbe: torch.nn.Module) -> bool:
    """Return whether lookups of a TBE are tracked."""
    return tbe in _tracked


class TbeMarks:
    """The marks of one TBE's tables, and the hooks that make them, from `start` to `remove`.

    tables: the indices of the tables to track. Hooks run on the threads of forward and backward.
    """

    def __init__(self, tbe: Any, tables: Sequence[int]) -> None:
        rows_counts = [int(spec[0]) for spec in tbe.embedding_specs]
        # Rows are numbered over all tables; those of a table begin at begins[table].
        self._begins = np.cumsum([0, *rows_counts])
        self._table_of_feature = [int(table) for table in tbe.feature_table_map]
        self._by_feature = torch.tensor(
            [[int(self._begins[table]), rows_counts[table]] for table in self._table_of_feature],
            dtype=torch.int64,
            device="cpu",
        ).reshape(-1, 2)
        self._by_feature_on: dict[torch.device, torch.Tensor] = {}
        self.tables = {table: FixedMarks(rows_counts[table], before_cut=self.settle) for table in tables}
        self._guard = Guard()  # Entered again: hooks of modules call each other.
        self._mask: RowMask | None = None
        self._settled_count = 0
        self._handles: list[Any] = []

    def start(self, tbe: torch.nn.Module, holder: torch.nn.Module) -> None:
        """Begin to track; holder is the module that adapters find, which is the TBE itself or holds it."""
        self._handles.append(tbe.register_forward_hook(self._after_forward, with_kwargs=True))
        for module in {id(module): module for module in (tbe, holder)}.values():
            self._handles.append(module.register_load_state_dict_post_hook(self._after_load))  # type: ignore[no-untyped-call]
        _tracked[tbe] = self

    def remove(self, tbe: torch.nn.Module) -> None:
        """Stop tracking: cuts of the tables do not know touched rows from now on."""
        if _tracked.get(tbe) is self:
            del _tracked[tbe]
        for handle in self._handles:
            handle.remove()

    def rows_of(self, indices: Any, offsets: Any, batch_sizes: Sequence[Sequence[int]] | None = None) -> torch.Tensor:
        """Return the rows of a batch, numbered over all tables: int64 [n] on the device of indices.

        indices and offsets are tensors, `[n]` and `[samples + 1]`, feature by feature. batch_sizes: the samples of
        each feature, rank by rank, if they differ.
        """
        device = indices.device
        # The feature of an index is the last one that begins at or before its place. All on the device.
        first_places = self._first_places(offsets.to(device), batch_sizes)[1:].long()
        places = torch.arange(indices.numel(), dtype=torch.int64, device=device)
        feature = torch.searchsorted(first_places.contiguous(), places, right=True)
        by_feature = self._features(device).index_select(0, feature)
        index = indices.reshape(-1).long()
        # FBGEMM's bounds check replaces an index out of range with 0.
        in_range = (index >= 0) & (index < by_feature[:, 1])
        return by_feature[:, 0] + torch.where(in_range, index, 0)

    def mark(self, rows: torch.Tensor) -> int:
        """Collect rows of `rows_of` for the next `settle`; return how many calls of it there were so far."""
        with self._guard.again(), torch.no_grad():
            if self._mask is None or self._mask.device != rows.device:
                self.settle()
                self._mask = row_mask(int(self._begins[-1]), rows.device)
            self._mask.mark(rows)
            return self._settled_count

    def mark_again(self, rows: torch.Tensor, *, settled_count: int) -> None:
        """Mark rows again if their first mark, which returned settled_count, has been settled since."""
        with self._guard.again():
            if settled_count != self._settled_count:
                self.mark(rows)

    def settle(self) -> None:
        """Move what was collected to the marks of the tables; waits for the device, see RowMask.take."""
        with self._guard.again(), torch.no_grad():
            self._settled_count += 1
            if self._mask is None:
                return
            rows = self._mask.take()
            self._mask = None
            for table, marks in self.tables.items():
                begin, end = np.searchsorted(rows, self._begins[table : table + 2])
                marks.mark(rows[begin:end] - self._begins[table])

    def _first_places(self, offsets: torch.Tensor, batch_sizes: Sequence[Sequence[int]] | None) -> torch.Tensor:
        """Return where each feature begins among the indices, on the device of offsets."""
        features_count, samples_count = len(self._table_of_feature), offsets.numel() - 1
        if batch_sizes is None:
            step = samples_count // features_count
            # A view: nothing is sent to the device.
            return offsets[: step * features_count : step] if step else offsets[:1].expand(features_count)
        begins = np.cumsum([0, *(sum(sizes) for sizes in batch_sizes)])[:-1]
        return offsets.index_select(0, sent(torch.from_numpy(begins), offsets.device))

    def _features(self, device: torch.device) -> torch.Tensor:
        """Return (first row, rows) of the table of each feature, on a device; copied there once, with a wait."""
        if device not in self._by_feature_on:
            self._by_feature_on[device] = self._by_feature.to(device)
        return self._by_feature_on[device]

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def _after_forward(self, tbe: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled():
            return  # There will be no backward.
        given = {**dict(zip(FORWARD_ARGUMENTS, args, strict=False)), **kwargs}
        with torch.no_grad():
            rows = self.rows_of(*(given.get(name) for name in ("indices", "offsets", BATCH_SIZES)))
        settled_count = self.mark(rows)
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self.mark_again(rows, settled_count=settled_count))  # type: ignore[no-untyped-call]

    def _after_load(self, module: torch.nn.Module, incompatible_keys: object) -> None:
        for marks in self.tables.values():
            marks.lose_all()


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for part in output:
            yield from _tensors(part)
