"""Which rank writes which of the tensors and tables that several ranks hold in full.

Every plain tensor of the state is a replica: other ranks hold it too, or they do not, and no rank can know. So is a
table that holds all ids, and so are the boxes of a tensor that is spread over some of the ranks only. So

1. the first save of a Saver captures all of them, and sends the coordinator a digest of their names, dtypes and shapes,
   and one of what is in them (replica_contents.py), which must be the same on all ranks,
2. the coordinator announces whether all ranks have the same, and if not, which rank writes which (writers.py); every
   rank writes its share of what it has captured,
3. from then on each captures only its share, for as long as it has the same ones and no save fails.

Ranks learn that at different times, and saves may be queued. So a rank that captured its share sends by which agreement
it did, and a rank that captured everything writes its share of it, if it holds what was agreed. Where one rank alone
holds others than before, what each has captured decides about this one save, and the next one asks again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

import torch
import xxhash

from asyncckpt.coordination.messages import malformed
from asyncckpt.engine.ranks.holdings import TableSlice, is_replicated, is_whole, slice_of
from asyncckpt.engine.save.state_cut import ByPeers
from asyncckpt.errors import CorruptError
from asyncckpt.format.strict_json import Json, dumps, loads
from asyncckpt.format.tree import VALUE, Path, composites, leaves, path_name
from asyncckpt.model.sharded import Sharded
from asyncckpt.model.table import HoldsRange, Table
from asyncckpt.plan.state import FlatState

SMALL_BYTES_MAX = 4096
TABLE_PREFIX = "table "  # JSON never begins so: no path of a tensor is that of a table.


@dataclass(frozen=True)
class Replica:
    """A tensor or table that a rank holds in full: its path as text, its size, what it is like; and where it is here.

    leaf: number of the tensor among the leaves of the state; None for a table. by_first: the first rank that has it
    writes it. is_buffer: it may differ from rank to rank.
    """

    path: str
    bytes: int
    form: str
    leaf: int | None = None
    by_first: bool = False
    is_buffer: bool = False


@dataclass(frozen=True)
class ReplicaList:
    """All of them on this rank, and the slice of each other table, by its name."""

    items: tuple[Replica, ...] = ()
    slices: Mapping[str, TableSlice] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """Equal on ranks that compute the same shares: it covers all that these follow from."""
        return xxhash.xxh3_128_hexdigest(self.encoded())

    @cached_property
    def digest_with_slices(self) -> str:
        return xxhash.xxh3_128_hexdigest(self.digest.encode() + dumps(self.encoded_slices()))

    def encoded_slices(self) -> dict[str, Json]:
        return {name: own.encoded() for name, own in self.slices.items()}

    def encoded(self) -> bytes:
        return dumps([[item.path, item.bytes, item.form, item.by_first] for item in self.items])


@dataclass(frozen=True)
class WrittenByPeers(ByPeers):
    """What other ranks write, and the agreement by which they do."""

    agreement: str = ""

    def __bool__(self) -> bool:
        return bool(self.leaves or self.tables)


NOTHING_WRITTEN = WrittenByPeers()


class Replicas:
    """What this rank knows of the replicas of one Saver.

    Callers ask for the list and the share; the background agrees and forgets, and may do so between the two.
    """

    def __init__(self, rank: int, ranks_count: int) -> None:
        self._rank = rank
        self._ranks_count = ranks_count
        self._key: object = None
        self._list = ReplicaList()
        self._agreed: tuple[ReplicaList, WrittenByPeers] | None = None

    def list_of(self, flat: FlatState, tables: Mapping[str, Table]) -> ReplicaList:
        """Return the replicas of a state; the last answer while nothing changed its shape."""
        tensors = [tensor for leaf, tensor in enumerate(flat.tensors) if leaf not in flat.sharded]
        spread = [
            (leaf, item.whole_shape, item.dtype, item.boxes, item.is_writer, item.spread_over)
            for leaf, item in flat.sharded.items()
        ]
        key = (
            flat.tree,
            [tensor.dtype for tensor in tensors],
            list(map(torch.Tensor.size, tensors)),
            spread,
            [(name, is_replicated(table), table.shard, _range(table)) for name, table in tables.items()],
        )
        if key != self._key:
            self._list, self._key = _list_of(flat, tables, self._ranks_count), key
        return self._list

    def by_peers(self, listed: ReplicaList) -> WrittenByPeers | None:
        """Return what other ranks write, when that is agreed; None: capture all, and ask."""
        agreed = self._agreed
        return agreed[1] if agreed is not None and listed is agreed[0] else None

    def agree(self, listed: ReplicaList, by_peers: WrittenByPeers) -> None:
        """Capture only this rank's share from now on: a save of all ranks has committed so."""
        self._agreed = listed, by_peers

    def forget(self) -> None:
        """Ask again, for a save of all ranks has failed."""
        self._agreed = None

    def written_by_peers(self, listed: ReplicaList, owners: Mapping[str, int], agreement: str) -> WrittenByPeers:
        """Return what other ranks write. `owners`: by path."""
        missing = [item.path for item in listed.items if item.path not in owners]
        if missing:
            raise CorruptError("no rank was named to write a tensor or table", found=missing[:5])
        others = [item for item in listed.items if owners[item.path] != self._rank]
        return WrittenByPeers(
            leaves=frozenset(item.leaf for item in others if item.leaf is not None),
            tables=frozenset(item.path.removeprefix(TABLE_PREFIX) for item in others if item.leaf is None),
            agreement=agreement,
        )


def _range(table: Table) -> tuple[int, int, int] | None:
    return table.id_range() if isinstance(table, HoldsRange) else None


def _list_of(flat: FlatState, tables: Mapping[str, Table], ranks_count: int) -> ReplicaList:
    paths = [path for path, node in leaves(flat.tree) if node is not VALUE]
    buffers = _buffer_paths(flat)
    facts = {path: node[3] for path, node in composites(flat.tree)}
    items = []
    for leaf, (path, tensor) in enumerate(zip(paths, flat.tensors, strict=True)):
        spread = flat.sharded.get(leaf)
        if spread is not None:
            may_be_elsewhere = spread.spread_over not in (None, ranks_count)
            if may_be_elsewhere and spread.pieces and spread.is_written_here(ranks_count):
                items.append(_boxes(json.dumps(path), spread, leaf))
        else:
            form = f"{tensor.dtype} {list(tensor.shape)}"
            if path[:-1] in facts:
                form += f" of {facts[path[:-1]]}"
            is_buffer = any(path[:end] in buffers for end in range(len(path) + 1))
            by_first = is_buffer or tensor.nbytes <= SMALL_BYTES_MAX
            items.append(Replica(json.dumps(path), tensor.nbytes, form, leaf, by_first=by_first, is_buffer=is_buffer))
    slices = {}
    for name, table in tables.items():
        if is_whole(table):
            items.append(_table_replica(name, table))
        else:
            slices[name] = slice_of(table)
    return ReplicaList(items=tuple(items), slices=slices)


def _boxes(path: str, spread: Sharded, leaf: int) -> Replica:
    """Return the boxes that this rank holds of a leaf: a replica of those of a rank that holds the same ones."""
    boxes = [(list(begin), list(shape)) for begin, shape in spread.boxes]
    size = sum(piece.tensor.nbytes for piece in spread.pieces)
    return Replica(f"{path} {boxes}", size, f"{spread.dtype} boxes of {list(spread.whole_shape)}", leaf=leaf)


def shown_replica(path: str) -> str:
    """Return the path of a replica for people: "table 'user'", "tensor 'model.weight'"."""
    if path.startswith(TABLE_PREFIX):
        return f"table {path.removeprefix(TABLE_PREFIX)!r}"
    with suppress(ValueError, LookupError, TypeError):  # Another rank may have sent it.
        keys, end = json.JSONDecoder().raw_decode(path)
        return f"tensor {path_name(keys)!r}{path[end:]}"
    return f"tensor {path}"


def _buffer_paths(flat: FlatState) -> set[Path]:
    """Return the paths of all buffers of modules in a state."""
    modules = ((path, owner) for path, owner in flat.stateful if isinstance(owner, torch.nn.Module))
    return {(*path, name) for path, owner in modules for name, _ in owner.named_buffers(remove_duplicate=False)}


def _table_replica(name: str, table: Table) -> Replica:
    schema = table.schema()
    row_bytes = sum(column.dtype.itemsize * torch.Size(column.row_shape).numel() for column in schema.columns)
    form = " ".join(f"{column.name} {column.dtype} {list(column.row_shape)}" for column in schema.columns)
    if isinstance(table, HoldsRange):
        form += " rows {} to {}".format(*table.id_range())
    rows = len(table) if isinstance(table, Sized) else 0
    return Replica(path=TABLE_PREFIX + name, bytes=rows * row_bytes, form=form)


def decode_list(raw: bytes, *, rank: int) -> list[Replica]:
    """Return the replicas of another rank; CorruptError for anything else."""
    value: Json = loads(raw, owner=f"the list of tensors of rank {rank}")
    if type(value) is not list or not all(
        type(item) is list and [type(part) for part in item] == [str, int, str, bool] for item in value
    ):
        raise malformed(f"rank {rank}", "the list of tensors")
    return [Replica(path=path, bytes=size, form=form, by_first=by_first) for path, size, form, by_first in value]


def decode_owners(raw: bytes) -> dict[str, int]:
    """Return who writes what, as the coordinator has sent it; CorruptError for anything else."""
    value: Json = loads(raw, owner="the list of writers")
    if type(value) is not dict or not all(type(rank) is int for rank in value.values()):
        raise malformed("rank 0", "the list of writers")
    return {path: rank for path, rank in value.items() if type(rank) is int}
