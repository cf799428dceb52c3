"""Which rank writes which of the tensors that several ranks hold in full.

Every plain tensor of the state is a replica: other ranks hold it too, or they do not, and no rank can know. So

1. the first save of a Saver captures all of them, and sends the coordinator a digest of their names, dtypes and shapes,
2. the coordinator tells whether all ranks have the same, and if not, which rank writes which; every rank writes its
   share of what it has captured,
3. once all ranks have said the same, each captures only its share, for as long as its own digest stays that.

The shares are balanced by bytes, and follow from the names alone where all ranks have the same ones: nothing has to be
sent for them.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from asyncckpt.errors import ConflictError, CorruptError
from asyncckpt.format.strict_json import Json, dumps, loads
from asyncckpt.format.tree import VALUE, Node, leaves
from asyncckpt.plan.state import FlatState


@dataclass(frozen=True)
class Replica:
    """A tensor that a rank holds in full: number of its leaf there, its path as text, its size, dtype and shape."""

    leaf: int
    path: str
    bytes: int
    form: str


@dataclass(frozen=True)
class ReplicaList:
    """All of them on this rank. `digest` is the same on ranks that have the same ones."""

    items: tuple[Replica, ...]
    digest: str

    def encoded(self) -> bytes:
        return dumps([[item.leaf, item.path, item.bytes, item.form] for item in self.items])


NO_REPLICAS = ReplicaList((), "")


class Replicas:
    """What this rank knows of the replicas of one Saver. Used by one save at a time."""

    def __init__(self, rank: int, ranks_count: int) -> None:
        self._rank = rank
        self._ranks_count = ranks_count
        self._key: object = None
        self._list = NO_REPLICAS
        self._agreed: str | None = None
        self._elsewhere: frozenset[int] = frozenset()

    def list_of(self, flat: FlatState) -> ReplicaList:
        """The replicas of a state; the last answer while nothing changed its shape."""
        tensors = [tensor for leaf, tensor in enumerate(flat.tensors) if leaf not in flat.sharded]
        key = (
            flat.tree,
            [tensor.dtype for tensor in tensors],
            list(map(torch.Tensor.size, tensors)),
            set(flat.sharded),
        )
        if key != self._key:
            self._list, self._key = _list_of(flat.tree, flat), key
        return self._list

    def elsewhere(self, listed: ReplicaList) -> frozenset[int] | None:
        """The leaves that other ranks write, once that is agreed upon; None: capture all, and ask."""
        return self._elsewhere if listed.digest == self._agreed else None

    def agree(self, listed: ReplicaList) -> None:
        """All ranks have the same: from now on this rank captures its share."""
        self._agreed = listed.digest
        self._elsewhere = self.not_mine(listed, same_owners(listed, self._ranks_count))

    def forget(self) -> None:
        """A save of all ranks has failed: ask again."""
        self._agreed = None

    def not_mine(self, listed: ReplicaList, owners: Mapping[str, int]) -> frozenset[int]:
        """The leaves that other ranks write. `owners`: by path."""
        missing = [item.path for item in listed.items if item.path not in owners]
        if missing:
            raise CorruptError("no rank was named to write a tensor", found=missing[:5])
        return frozenset(item.leaf for item in listed.items if owners[item.path] != self._rank)


def _list_of(tree: Node, flat: FlatState) -> ReplicaList:
    paths = [path for path, node in leaves(tree) if node is not VALUE]
    items = []
    digest = xxhash.xxh3_128()
    for leaf, (path, tensor) in enumerate(zip(paths, flat.tensors, strict=True)):
        if leaf in flat.sharded:
            continue
        text, form = json.dumps(path), f"{tensor.dtype} {list(tensor.shape)}"
        items.append(Replica(leaf=leaf, path=text, bytes=tensor.nbytes, form=form))
        digest.update(f"{text} {form}\n".encode())
    return ReplicaList(items=tuple(items), digest=digest.hexdigest())


def same_owners(listed: ReplicaList, ranks_count: int) -> dict[str, int]:
    """Who writes what when all ranks hold the same replicas."""
    heap = [(0, rank) for rank in range(ranks_count)]
    owners = {}
    for item in sorted(listed.items, key=_largest_first):
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + item.bytes, rank))
        owners[item.path] = rank
    return owners


def different_owners(held: Sequence[Sequence[Replica]]) -> dict[str, int]:
    """Who writes what when ranks hold others: the largest first, to the rank among its holders with least so far.

    held: of every rank. ConflictError when a tensor is not the same on all ranks that have it.
    """
    holders: dict[str, list[int]] = defaultdict(list)
    items: dict[str, Replica] = {}
    for rank, replicas in enumerate(held):
        for item in replicas:
            first = items.setdefault(item.path, item)
            if first.form != item.form:
                raise ConflictError(
                    f"tensor {item.path} is not the same on ranks {holders[item.path][0]} and {rank}",
                    found=item.form,
                    expected=first.form,
                    hint="what belongs to one rank alone is a plain value, or an asyncckpt.Sharded of the whole",
                )
            holders[item.path].append(rank)
    loads_of = [0] * len(held)
    owners = {}
    for item in sorted(items.values(), key=_largest_first):
        rank = min(holders[item.path], key=lambda rank: (loads_of[rank], rank))
        loads_of[rank] += item.bytes
        owners[item.path] = rank
    return owners


def _largest_first(item: Replica) -> tuple[int, str]:
    return -item.bytes, item.path


def check_balanced(told: Mapping[int, tuple[str, bool]]) -> bool:
    """Whether all ranks have the same replicas. told: of every rank its digest, and whether it captured its share only.

    ConflictError when only some ranks have others than at the last save: what these left out nobody has captured.
    """
    is_same = len({digest for digest, _ in told.values()}) == 1
    shares = [rank for rank, (_, is_share) in told.items() if is_share]
    if shares and (len(shares) < len(told) or not is_same):
        changed = sorted(told.keys() - set(shares)) or sorted(told)
        raise ConflictError(
            f"tensors have got other names, dtypes or shapes on ranks {changed[:10]} only",
            hint="this save is lost; the next one captures everything on all ranks",
        )
    return is_same


def decode_list(raw: bytes, *, rank: int) -> list[Replica]:
    """The replicas of another rank; CorruptError for anything else."""
    owner = f"the list of tensors of rank {rank}"
    value: Json = loads(raw, owner=owner)
    if type(value) is not list or not all(
        type(item) is list and [type(part) for part in item] == [int, str, int, str] for item in value
    ):
        raise CorruptError(f"{owner} is none")
    return [Replica(leaf=leaf, path=path, bytes=size, form=form) for leaf, path, size, form in value]


def encode_owners(owners: Mapping[str, int]) -> bytes:
    return dumps(dict(owners))


def decode_owners(raw: bytes) -> dict[str, int]:
    """Who writes what, as the coordinator has told it; CorruptError for anything else."""
    value: Json = loads(raw, owner="the list of writers")
    if type(value) is not dict or not all(type(rank) is int for rank in value.values()):
        raise CorruptError("the list of writers is none")
    return {path: rank for path, rank in value.items() if type(rank) is int}
