"""track_lookups: find out which rows of FBGEMM and TorchRec tables were written, for saves.

Opt-in, because any code may write to a TBE's memory. Not tracked, and so saved completely:

- tables of other modules, whose optimizer is a torch one: nn.Embedding, plain collections, dense TBEs;
- TBEs without a fused optimizer, or with one that updates all rows (ensemble, EMA);
- tables behind a cache of another dtype: a row is randomly rounded when it is evicted, without a lookup;
- tables of sharded managed collision (ZCH) modules: an eviction resets rows, without a lookup.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from asyncckpt.adapters.fbgemm import SPLIT_TBE
from asyncckpt.adapters.fbgemm_cache import TbeCache
from asyncckpt.adapters.lookup_hooks import TbeMarks, is_tracked
from asyncckpt.adapters.torchrec import SHARDED_COLLECTIONS, kernels_of
from asyncckpt.errors import UsageError
from asyncckpt.modules.registry import is_kind
from asyncckpt.modules.walk import Claim, walk

# Values of OptimType: fused optimizers that write only the rows of a batch.
ROW_OPTIMIZERS = frozenset((
    "sgd", "exact_sgd", "exact_adagrad", "row_wise_adagrad", "exact_row_wise_adagrad", "adam", "partial_row_wise_adam",
    "lamb", "partial_row_wise_lamb", "lars_sgd",
))  # fmt: skip
MANAGED_COLLISIONS = frozenset(
    ("torchrec.distributed.mc_embedding_modules.BaseShardedManagedCollisionEmbeddingCollection",)
)


class LookupTracking:
    """The result of track_lookups. `tables_count` is how many tables of the module are tracked."""

    def __init__(self, tables_count: int, started: list[tuple[torch.nn.Module, TbeMarks]]) -> None:
        self.tables_count = tables_count
        self._started = started

    def remove(self) -> None:
        """Stop the tracking that this call began: later saves take all rows. Idempotent."""
        for tbe, marks in self._started:
            marks.remove(tbe)
        self._started = []


def track_lookups(module: torch.nn.Module) -> LookupTracking:
    """Mark the rows that the fused optimizers in a module write, from now on.

    Their tables, made by `tables_of` before or after, then know which rows changed between saves. Rows that a training
    forward looked up count as written. After writes that torch counts, as of a fused optimizer's load_state_dict, one
    save takes all rows; report those that it does not count with `FixedTable.touch(ids)`. Costs two bytes per row and a
    pass over the ids of a batch; if the ids are on a GPU, a save makes the host wait until the last forward has run
    there (lookup_hooks.py). Cannot be used with CUDA graphs, which replay no hooks. Raises UsageError if the module
    holds no table that can be tracked.
    """
    started: list[tuple[torch.nn.Module, TbeMarks]] = []
    tables_count = 0
    for claim in _claims(module):
        for tbe in _tbes(claim.module):
            tables = _tables_to_track(tbe)
            tables_count += len(tables)
            if tables and not is_tracked(tbe):
                marks = TbeMarks(tbe, tables)
                marks.start(tbe, claim.module)
                started.append((tbe, marks))
    if not tables_count:
        what = "a module holds no table whose lookups can be tracked"
        raise UsageError(what, found=type(module), expected="a split TBE with a fused optimizer")
    return LookupTracking(tables_count, started)


def _claims(module: torch.nn.Module) -> Iterator[Claim]:
    walked = walk(module)
    evicting = [path for path, other in walked.others if is_kind(other, MANAGED_COLLISIONS)]
    for claim in walked.claims:
        if not any(not path or f"{claim.path}.".startswith(f"{path}.") for path in evicting):
            yield claim


def _tbes(module: Any) -> Iterator[Any]:
    found = [module]
    if is_kind(module, frozenset(SHARDED_COLLECTIONS)):
        found = [kernel._emb_module for kernel in kernels_of(module)]
    return (tbe for tbe in found if is_kind(tbe, frozenset((SPLIT_TBE,))))


def _tables_to_track(tbe: Any) -> list[int]:
    if getattr(getattr(tbe, "optimizer", None), "value", None) not in ROW_OPTIMIZERS:
        return []
    weights = list(tbe.split_embedding_weights())
    cache = TbeCache.of(tbe, weights=weights)
    return [
        index
        for index, rows in enumerate(weights)
        if not cache.holds(index) or rows.dtype is tbe.lxu_cache_weights.dtype
    ]
