"""Which rank writes which replica: what the coordinator decides of all ranks' lists.

The shares are balanced by bytes, and follow from the names alone where all ranks have the same ones: nothing has to be
sent for them. Buffers of modules, and small tensors, are written by the first rank that has them: between two forward
passes, buffers differ from rank to rank, and DistributedDataParallel takes those of rank 0.

    ranks have captured                                 it is decided                for
    their shares, as follows from their lists           nothing: each writes these   -
    everything                                          by their lists               as long as these stay the same
    some everything, some their shares as follows       what was decided then        the same
    some their shares as followed from other lists      by what each has captured    this save only
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from asyncckpt.engine.ranks.holdings import TableSlice, check_slices
from asyncckpt.engine.ranks.replicas import TABLE_PREFIX, Replica, shown_replica
from asyncckpt.errors import ConflictError

DECISIONS_KEPT_MAX = 8


def agreement_of(digests: Sequence[str]) -> str:
    """Return the name of what follows from the lists and slices of all ranks. digests: in the order of the ranks."""
    return xxhash.xxh3_128_hexdigest(" ".join(digests).encode())


@dataclass(frozen=True)
class Held:
    """What one rank has: the replicas, and the slice of each other table, by its name."""

    items: Sequence[Replica]
    slices: Mapping[str, TableSlice]


@dataclass(frozen=True)
class Decision:
    """Which rank writes what, by path. held: by all ranks. is_same: every rank knows it, for all hold the same."""

    owners: Mapping[str, int]
    held: Sequence[Held]
    is_same: bool

    def share_of(self, rank: int) -> list[Replica]:
        """Return what a rank captures that knows of the decision."""
        return [item for item in self.held[rank].items if self.owners[item.path] == rank]


class Decisions:
    """What the coordinator has decided, by the names of agreements; the newest few."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[str, Decision] = OrderedDict()

    def find(self, agreement: str) -> Decision | None:
        return self._by_name.get(agreement)

    def add(self, agreement: str, decision: Decision) -> None:
        self._by_name[agreement] = decision
        while len(self._by_name) > DECISIONS_KEPT_MAX:
            self._by_name.popitem(last=False)

    def holder(self, rank: int, agreement: str) -> Held:
        """Return what a rank has that captured its share by an agreement. ConflictError when nobody knows that."""
        return self._known(rank, agreement).held[rank]

    def decide(
        self, held: Sequence[Held], captured_by: Mapping[int, str], *, is_same: bool, are_all: bool = True
    ) -> Decision:
        """Decide by what each rank has captured: everything, or (captured_by) its share by an agreement.

        are_all: what every rank holds is known.
        is_same: they hold the same, and have captured it. ConflictError when ranks contradict each other, or when a
        rank has left out what another one, which was to write it, has no longer.
        """
        check_slices([one.slices for one in held], [_tables_of(one) for one in held], are_all=are_all)
        if is_same:
            return Decision(same_owners(held[0].items, len(held)), held, is_same=True)
        owners = different_owners([item.items for item in held])
        if captured_by:
            expected, owners = owners, different_owners(self._captured(held, captured_by))
            missing = sorted(expected.keys() - owners.keys())
            if missing:
                raise ConflictError(
                    "tensors or tables have got other names, dtypes or shapes on some ranks only",
                    found=missing[:5],
                    hint="this save is lost, because no rank has captured these; the next one captures everything",
                )
        return Decision(owners, held, is_same=False)

    def _captured(self, held: Sequence[Held], captured_by: Mapping[int, str]) -> list[Sequence[Replica]]:
        """Return what each rank has captured, but of a share no table that another rank has captured too.

        That one has all rows of it; a share may be rows that can be laid only over a table of the same rank.
        """
        whole = {item.path for rank, one in enumerate(held) if rank not in captured_by for item in one.items}
        tables = {path for path in whole if path.startswith(TABLE_PREFIX)}
        captured: list[Sequence[Replica]] = []
        for rank, one in enumerate(held):
            if rank in captured_by:
                share = self._known(rank, captured_by[rank]).share_of(rank)
                captured.append([item for item in share if item.path not in tables])
            else:
                captured.append(one.items)
        return captured

    def _known(self, rank: int, agreement: str) -> Decision:
        decision = self._by_name.get(agreement)
        if decision is None:
            raise ConflictError(
                f"rank {rank} has captured what an older agreement asks for",
                hint="this save is lost; the next one captures everything on all ranks",
            )
        return decision


def same_owners(items: Sequence[Replica], ranks_count: int) -> dict[str, int]:
    """Return who writes what when all ranks hold the same replicas."""
    owners = {item.path: 0 for item in items if item.by_first}
    heap = [(0, rank) for rank in range(1, ranks_count)]
    heapq.heappush(heap, (sum(item.bytes for item in items if item.by_first), 0))
    for item in sorted((item for item in items if not item.by_first), key=_largest_first):
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + item.bytes, rank))
        owners[item.path] = rank
    return owners


def different_owners(held: Sequence[Sequence[Replica]]) -> dict[str, int]:
    """Return who writes what when ranks hold others: the largest first, to its holder with least so far.

    held: of every rank. ConflictError when a tensor is not the same on all ranks that have it.
    """
    holders: dict[str, list[int]] = defaultdict(list)
    items: dict[str, Replica] = {}
    for rank, replicas in enumerate(held):
        for item in replicas:
            first = items.setdefault(item.path, item)
            if (first.form, first.by_first) != (item.form, item.by_first):
                raise ConflictError(
                    f"{shown_replica(item.path)} is not the same on ranks {holders[item.path][0]} and {rank}",
                    found=item.form,
                    expected=first.form,
                    hint="what belongs to one rank alone is a plain value, or an asyncckpt.Sharded of the whole",
                )
            holders[item.path].append(rank)
    loads_of = [0] * len(held)
    owners = {}
    for item in sorted(items.values(), key=lambda item: (not item.by_first, *_largest_first(item))):
        ranks = holders[item.path]
        rank = ranks[0] if item.by_first else min(ranks, key=lambda rank: (loads_of[rank], rank))
        loads_of[rank] += item.bytes
        owners[item.path] = rank
    return owners


def _tables_of(held: Held) -> set[str]:
    return {item.path.removeprefix(TABLE_PREFIX) for item in held.items if item.path.startswith(TABLE_PREFIX)}


def _largest_first(item: Replica) -> tuple[int, str]:
    return -item.bytes, item.path
