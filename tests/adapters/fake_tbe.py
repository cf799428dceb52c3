"""A table batched embedding as FBGEMM documents it, small and on the CPU: rows behind a device cache, or not.

Only what fbgemm_gpu's training module shows by attributes, with what makes a wrong reader wrong:

- cache slots hold linear row numbers; where a table begins in them is kept per feature, and features share tables;
- a cached row is newer than the managed one, and wider than its table where tables have different dims;
- flush() writes to the managed rows, rounds them with the default random numbers, and is never needed;
- a prefetch moves weights and slots on a stream of its own: before that is waited for they do not fit each other;
- the backward writes the rows that its forward looked up, also row 0 where an index was out of range;
- no kernel moves torch's version counters, whatever it writes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from asyncckpt.adapters.fbgemm import SPLIT_TBE

WAYS = 2


class OptimType(enum.Enum):
    EXACT_SGD = "exact_sgd"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    ADAM = "adam"
    NONE = "none"


@dataclass(frozen=True)
class Spec:
    rows: int
    dim: int
    cached: bool = False


class FakeTbeStream:
    """A device stream: what is queued happens when it is waited for."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.waits_for: list[FakeTbeStream] = []

    def synchronize(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    def wait_stream(self, other: FakeTbeStream) -> None:
        self.waits_for.append(other)


class CurrentStream(FakeTbeStream):
    """The stream of training: the host does what is queued there at once."""

    def wait_stream(self, other: FakeTbeStream) -> None:
        super().wait_stream(other)
        other.synchronize()


class FakeTbe(nn.Module):
    """Tables of specs, read by the features of feature_table_map."""

    def __init__(
        self,
        specs: list[Spec],
        *,
        optimizer: OptimType = OptimType.EXACT_ROWWISE_ADAGRAD,
        feature_table_map: list[int] | None = None,
        cache_sets: int = 2,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype = torch.float32,
        table_names: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.specs = specs
        self.embedding_specs = [
            (spec.rows, spec.dim, "MANAGED_CACHING" if spec.cached else "HOST", "") for spec in specs
        ]
        self.feature_table_map = feature_table_map or list(range(len(specs)))
        self.optimizer = optimizer
        if table_names is not None:
            self.table_names = table_names
        self._make_rows(dtype, seed)
        self._make_states()
        self._make_cache(cache_sets, cache_dtype)
        self.register_buffer("iter", torch.zeros(1, dtype=torch.int64), persistent=False)
        self.prefetch_stream: FakeTbeStream | None = None
        self.timesteps_prefetched: list[int] = []
        self.flushes_count = 0
        self.resets_count = 0

    # -- what FBGEMM has -------------------------------------------------------------------------------------------

    def split_embedding_weights(self) -> list[torch.Tensor]:
        views = []
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            memory = self.weights_uvm if spec.cached else self.weights_host
            views.append(memory.detach()[offset : offset + spec.rows * spec.dim].view(spec.rows, spec.dim))
        return views

    def split_optimizer_states(self) -> list[list[torch.Tensor]]:
        if self.optimizer is OptimType.NONE:
            raise NotImplementedError("Getting optimizer states is not supported")
        begins = torch.tensor([0, *(spec.rows for spec in self.specs)]).cumsum(0).tolist()
        elements = torch.tensor([0, *(spec.rows * spec.dim for spec in self.specs)]).cumsum(0).tolist()
        states = []
        for t, spec in enumerate(self.specs):
            rowwise = self.momentum1_host[begins[t] : begins[t + 1]]
            full = [
                memory[elements[t] : elements[t + 1]].view(spec.rows, spec.dim)
                for memory in (self.momentum1_host, self.momentum2_host)
                if memory.numel() >= elements[-1]
            ]
            if self.optimizer is OptimType.EXACT_ROWWISE_ADAGRAD:
                states.append([rowwise])
            elif self.optimizer is not OptimType.EXACT_SGD:
                states.append(full)
        return states

    def flush(self) -> None:
        """Write back with stochastic rounding, as FBGEMM does: another table afterwards, and other random numbers."""
        self.flushes_count += 1
        for t in self.cached_tables():
            for row, slot in self.cached(t).items():
                noise = torch.rand(self.specs[t].dim) * 1e-3
                self.split_embedding_weights()[t].data[row] = self.lxu_cache_weights[slot, : self.specs[t].dim] + noise

    def reset_cache_states(self) -> None:
        self.resets_count += 1
        self.lxu_cache_state.fill_(-1)
        self.lxu_state.fill_(0)

    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
        feature_requires_grad: torch.Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
    ) -> torch.Tensor:
        """Look rows up. What comes out has no meaning; its backward is a train_step on the rows."""
        rows = self.looked_up(indices, offsets, batch_size_per_feature_per_rank)
        if not torch.is_grad_enabled():
            return torch.zeros(1)
        found: torch.Tensor = _Lookup.apply(torch.zeros(0, requires_grad=True), self, rows)  # type: ignore[no-untyped-call]
        return found

    # -- training --------------------------------------------------------------------------------------------------

    def looked_up(
        self, indices: torch.Tensor, offsets: torch.Tensor, batch_sizes: list[list[int]] | None
    ) -> dict[int, list[int]]:
        """The rows of a batch by table, sample by sample."""
        features_count = len(self.feature_table_map)
        same = [[(len(offsets) - 1) // features_count]] * features_count
        found: dict[int, list[int]] = {}
        sample = 0
        for t, sizes in zip(self.feature_table_map, batch_sizes or same, strict=True):
            for _ in range(sum(sizes)):
                for index in indices[int(offsets[sample]) : int(offsets[sample + 1])].tolist():
                    found.setdefault(t, []).append(index if 0 <= index < self.specs[t].rows else 0)
                sample += 1
        return found

    def prefetch(self, table: int, rows: list[int]) -> None:
        """Bring rows into the cache for a coming batch."""
        self.timesteps_prefetched.append(len(self.timesteps_prefetched))
        moves = [row for row in rows if row not in self.cached(table)]
        if self.prefetch_stream is None:
            for row in moves:
                self._move_in(table, row)
            return
        stream = self.prefetch_stream
        for row in moves:
            # The kernel is under way: the slot says so already, its weights come when the stream has got there.
            slot, old = self._claim_slot(table, row)
            stream.queue.append(partial(self._fill_slot, slot, old, table, row))

    def train_step(self, step: int, rows: dict[int, list[int]]) -> None:
        """Update the rows given by table, after what was prefetched has come in."""
        if self.prefetch_stream is not None:
            self.prefetch_stream.synchronize()
        self.timesteps_prefetched.clear()
        self.iter += 1
        for t, touched in rows.items():
            for row in touched:
                self._update(t, row, step)

    def _update(self, t: int, row: int, step: int) -> None:
        values = self.newest(t, row)
        gradient = torch.full_like(values, 0.01 * (step + 1) * (row + 1))
        states = [] if self.optimizer is OptimType.NONE else self.split_optimizer_states()
        for state in states[t] if states else []:
            state.data[row] += gradient.float().mean() if state.dim() == 1 else gradient.float()
        values.data.sub_(gradient)

    def newest(self, t: int, row: int) -> torch.Tensor:
        """The live memory of a row: its place in the cache, to where it is moved if need be, or in the table."""
        if not self.specs[t].cached:
            return self.split_embedding_weights()[t][row]
        if row not in self.cached(t):
            self._move_in(t, row)
        return self.lxu_cache_weights[self.cached(t)[row], : self.specs[t].dim]

    # -- contents, for tests ---------------------------------------------------------------------------------------

    def cached_tables(self) -> list[int]:
        return [t for t, spec in enumerate(self.specs) if spec.cached]

    def cached(self, t: int) -> dict[int, int]:
        """Row -> slot of a table."""
        begin = self.begins[t]
        slots = enumerate(self.lxu_cache_state.reshape(-1).tolist())
        return {linear - begin: slot for slot, linear in slots if begin <= linear < begin + self.specs[t].rows}

    def rows_of(self, t: int) -> torch.Tensor:
        """The newest values of a table, in its dtype, read without moving anything."""
        values = self.split_embedding_weights()[t].clone()
        if self.specs[t].cached:
            for row, slot in self.cached(t).items():
                values[row] = self.lxu_cache_weights[slot, : self.specs[t].dim].to(values.dtype)
        return values

    # -- inside ----------------------------------------------------------------------------------------------------

    def _make_rows(self, dtype: torch.dtype, seed: int) -> None:
        sizes = {True: 0, False: 0}
        self.offsets = []
        for spec in self.specs:
            self.offsets.append(sizes[spec.cached])
            sizes[spec.cached] += spec.rows * spec.dim
        generator = torch.Generator().manual_seed(seed)
        rows = torch.rand(sizes[False], generator=generator).to(dtype)
        self.weights_host = nn.Parameter(rows, requires_grad=dtype.is_floating_point)
        self.register_buffer("weights_uvm", torch.rand(sizes[True], generator=generator).to(dtype))
        self.register_buffer("weights_dev", torch.zeros(0, dtype=dtype))

    def _make_states(self) -> None:
        elements = sum(spec.rows * spec.dim for spec in self.specs)
        rows = sum(spec.rows for spec in self.specs)
        sizes = {
            OptimType.EXACT_SGD: (1, 1),
            OptimType.NONE: (1, 1),
            OptimType.EXACT_ROWWISE_ADAGRAD: (rows, 1),
            OptimType.EXACT_ADAGRAD: (elements, 1),
            OptimType.ADAM: (elements, elements),
        }
        for name, size in zip(("momentum1_host", "momentum2_host"), sizes[self.optimizer], strict=True):
            self.register_buffer(name, torch.zeros(size))

    def _make_cache(self, cache_sets: int, dtype: torch.dtype) -> None:
        if not self.cached_tables():
            # As FBGEMM without a cache: names are there, sizes make no sense.
            for name in ("cache_hash_size_cumsum", "lxu_cache_state", "lxu_state"):
                self.register_buffer(name, torch.zeros(1, dtype=torch.int64), persistent=False)
            self.register_buffer("lxu_cache_weights", torch.zeros(0, 0, dtype=dtype))
            return
        self.begins: dict[int, int] = {}
        by_feature, total = [], 0
        for t in self.feature_table_map:
            if not self.specs[t].cached:
                by_feature.append(-1)
                continue
            if t not in self.begins:
                self.begins[t] = total
                total += self.specs[t].rows
            by_feature.append(self.begins[t])
        width = max(self.specs[t].dim for t in self.cached_tables())
        self.register_buffer("cache_hash_size_cumsum", torch.tensor([*by_feature, total]))
        self.register_buffer("lxu_cache_state", torch.full((cache_sets, WAYS), -1))
        self.register_buffer("lxu_state", torch.zeros(cache_sets, WAYS, dtype=torch.int64))
        self.register_buffer("lxu_cache_weights", torch.full((cache_sets * WAYS, width), 77.0).to(dtype))

    def _move_in(self, t: int, row: int) -> None:
        slot, old = self._claim_slot(t, row)
        self._fill_slot(slot, old, t, row)

    def _claim_slot(self, t: int, row: int) -> tuple[int, int]:
        """Take the slot used longest ago and say so in the state; returns it and the linear row that was there."""
        ages = self.lxu_state.reshape(-1)
        slot = int(ages.argmin())
        state = self.lxu_cache_state.view(-1)
        old = int(state[slot])
        state[slot] = self.begins[t] + row
        self.lxu_state.view(-1)[slot] = int(ages.max()) + 1
        return slot, old

    def _fill_slot(self, slot: int, old: int, t: int, row: int) -> None:
        for table, begin in self.begins.items():
            if begin <= old < begin + self.specs[table].rows:
                dim = self.specs[table].dim
                self.split_embedding_weights()[table].data[old - begin] = self.lxu_cache_weights[slot, :dim].to(
                    self.weights_uvm.dtype
                )
        dim = self.specs[t].dim
        self.lxu_cache_weights[slot] = 77.0  # What is right of a narrow row is not a row's.
        self.lxu_cache_weights[slot, :dim] = self.split_embedding_weights()[t][row].to(self.lxu_cache_weights.dtype)


class _Lookup(torch.autograd.Function):
    """What ties forward and backward of a FakeTbe together."""

    @staticmethod
    def forward(ctx: Any, placeholder: torch.Tensor, tbe: FakeTbe, rows: dict[int, list[int]]) -> torch.Tensor:
        ctx.tbe, ctx.rows = tbe, rows
        return torch.zeros(1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.tbe.train_step(int(ctx.tbe.iter), ctx.rows)
        return None, None, None


FakeTbe.__module__, FakeTbe.__qualname__ = SPLIT_TBE.rpartition(".")[0], SPLIT_TBE.rpartition(".")[2]
