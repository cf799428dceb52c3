"""torch's sharded tensors as leaves of a state: DTensor and ShardedTensor, as the boxes that one rank holds of a whole.

Where the boxes are is computed from the mesh and the placements alone, as torch.distributed.tensor lays them out, and
checked against the shape of what the rank holds. torch.distributed is never imported here: a leaf of one of its types
has imported it.

1. Shard(d) on a mesh dimension cuts dimension d into chunks of equal size, rounded up; the last ones may be smaller or
   empty. Several mesh dimensions may cut the same one, from left to right, or in the order of the spec (torch >= 2.10).
2. _StridedShard says that a mesh dimension cuts after some that stand right of it (FSDP2 over tensor parallel ranks).
   Where its factor names no such order it cuts each of `factor` chunks, so that a rank holds several boxes.
3. Replicate keeps everything: the ranks along it hold the same boxes, and one of them is the writer. Which one depends
   on the leaf's name and on the box, so that the bytes spread over the replicas. In a mesh of some of the job's ranks
   each is a writer: as many others may save, and agree on it.
4. Partial values are not the tensor's; they are refused.
"""

from __future__ import annotations

import itertools
import math
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from asyncckpt.errors import UnsupportedError, Words
from asyncckpt.model.own_rank import rank_in_group
from asyncckpt.model.sharded import Piece, Sharded

_DTENSOR = (("torch.distributed.tensor", "DTensor"), ("torch.distributed._tensor", "DTensor"))  # The second: torch 2.4.
_SHARDED_TENSOR = (("torch.distributed._shard.sharded_tensor", "ShardedTensor"),)
_LAYOUTS_MAX = 1 << 14

Runs = tuple[tuple[int, int], ...]  # (begin, size) of what is held of one dimension, in the order in which it is held.
# Of every mesh dimension the tensor dimension that it cuts and its split factor (1: a plain Shard); None: replicated.
Cuts = tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True)
class _Layout:
    """What one rank of a mesh holds: runs of every dimension, and which of how many equal replicas it is."""

    runs: tuple[Runs, ...]
    shape: tuple[int, ...]
    box_number: int
    replica_index: int
    replicas_count: int


def as_sharded(leaf: Any, salt: str) -> Sharded | None:
    """Return a leaf that is spread over ranks as this rank's pieces of it; None for any other leaf.

    The pieces share memory with the leaf. `salt` is the leaf's name (the same on all ranks, another for every leaf): it
    spreads the replicas' writers. A rank outside the mesh holds nothing. UnsupportedError for Partial placements, and
    for local tensors of another shape than the placements say. Runs on the training thread, without communication.
    """
    if isinstance(leaf, Sharded):
        return leaf
    if _is_one_of(leaf, _DTENSOR):
        return _from_dtensor(leaf, salt)
    if _is_one_of(leaf, _SHARDED_TENSOR):
        return _from_sharded_tensor(leaf)
    return None


def _is_one_of(leaf: Any, names: tuple[tuple[str, str], ...]) -> bool:
    for module, name in names:
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and isinstance(leaf, kind):
            return True
    return False


def _from_sharded_tensor(leaf: Any) -> Sharded:
    metadata = leaf.metadata()
    whole = tuple(metadata.size)
    pieces = [(shard.tensor, tuple(shard.metadata.shard_offsets)) for shard in leaf.local_shards()]
    group = getattr(leaf, "_process_group", None)
    return Sharded(
        whole_shape=whole,
        dtype=metadata.tensor_properties.dtype,
        pieces=_pieces(pieces, whole),
        spread_over=None if group is None else group.size(),
    )


def _from_dtensor(leaf: Any, salt: str) -> Sharded:
    return shard_of(leaf, salt, None)[0]


def shard_of(leaf: Any, salt: str, local: torch.Tensor | None) -> tuple[Sharded, int, int]:
    """Return a DTensor as this rank's pieces, and the number of its shard of how many. local: None: what it has here.

    UnsupportedError as of `as_sharded`.
    """
    mesh, whole = leaf.device_mesh, tuple(leaf.shape)
    cuts = _cuts(leaf.placements)
    if cuts is None:
        raise UnsupportedError(
            f"DTensor {salt!r} has a placement that cannot be saved",
            found=Words(leaf.placements),
            expected="Shard or Replicate",
            hint="redistribute it to Shard or Replicate placements first",
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Sharded(whole_shape=whole, dtype=leaf.dtype, pieces=()), 0, 0
    mesh_shape = tuple(mesh.shape)
    spec = getattr(leaf, "_spec", None)
    order = _announced_order(getattr(spec, "shard_order", None)) or _order(cuts, mesh_shape)
    layout = _layout(whole, mesh_shape, tuple(coordinate), cuts, order)
    if layout is None:
        raise UnsupportedError(
            f"DTensor {salt!r} is cut unevenly by a strided placement",
            found=(whole, str(leaf.placements)),
            hint="redistribute it to Shard placements first",
        )
    local = local_tensor(leaf) if local is None else local
    writer = (zlib.crc32(salt.encode()) + layout.box_number) % layout.replicas_count
    ranks_count = math.prod(mesh_shape)
    own = rank_in_group()  # None: the group is gone, and so is everybody who could save with this rank.
    is_over_all = own is None or own[1] == ranks_count
    spread = Sharded(
        whole_shape=whole,
        dtype=leaf.dtype,
        pieces=_local_pieces(local, layout, whole, salt),
        is_writer=not is_over_all or writer == layout.replica_index,
        spread_over=ranks_count if is_over_all else 0,
    )
    return spread, layout.box_number, ranks_count // layout.replicas_count


def local_tensor(leaf: Any) -> Any:
    """Return what the rank holds, without a copy and without autograd."""
    with torch.no_grad():
        local = leaf.to_local()
    wait = getattr(local, "wait", None)  # A collective that is under way (AsyncCollectiveTensor).
    return wait() if callable(wait) else local


def _local_pieces(local: Any, layout: _Layout, whole: tuple[int, ...], salt: str) -> tuple[Piece, ...]:
    if callable(getattr(local, "local_shards", None)) and callable(getattr(local, "local_offsets", None)):
        # TorchRec's LocalShardsWrapper: several boxes behind one local tensor, which knows where they are.
        return _pieces(list(zip(local.local_shards(), map(tuple, local.local_offsets()), strict=True)), whole)
    shape = tuple(local.shape)
    if shape != layout.shape:
        if 0 in shape and 0 in layout.shape:
            return ()  # Nothing here, however it is said.
        raise UnsupportedError(
            f"what this rank holds of DTensor {salt!r} has another shape than its placements say",
            found=shape,
            expected=layout.shape,
            hint="give the boxes yourself: asyncckpt.Sharded",
        )
    if all(len(runs) == 1 for runs in layout.runs):
        return _pieces([(local, tuple(runs[0][0] for runs in layout.runs))], whole)
    if 0 in shape:
        return ()
    return _pieces([_narrowed(local, box) for box in itertools.product(*map(_with_offsets, layout.runs))], whole)


def _with_offsets(runs: Runs) -> list[tuple[int, int, int]]:
    """Return (offset in the local tensor, begin in the whole, size) of every run."""
    ends = itertools.accumulate((size for _, size in runs), initial=0)
    return [(offset, begin, size) for offset, (begin, size) in zip(ends, runs, strict=False)]


def _narrowed(local: torch.Tensor, box: Sequence[tuple[int, int, int]]) -> tuple[torch.Tensor, tuple[int, ...]]:
    for dim, (offset, _, size) in enumerate(box):
        local = local.narrow(dim, offset, size)
    return local, tuple(begin for _, begin, _ in box)


def _pieces(found: Sequence[tuple[torch.Tensor, tuple[int, ...]]], whole: tuple[int, ...]) -> tuple[Piece, ...]:
    """Return boxes that hold something; in an empty whole also those that do not, so that the tensor is known."""
    is_empty = 0 in whole
    return tuple(Piece(tensor=t.detach(), begin=begin) for t, begin in found if is_empty or t.numel())


# --- The geometry: where the boxes of a mesh are. Pure numbers, kept from save to save. ---


@lru_cache(maxsize=_LAYOUTS_MAX)
def _cuts(placements: tuple[Any, ...]) -> Cuts | None:
    """Return how every mesh dimension cuts; None where one does something else."""
    cuts: list[tuple[int, int] | None] = []
    for placement in placements:
        if placement.is_replicate():
            cuts.append(None)
        elif type(placement).__name__ in ("Shard", "_StridedShard"):
            cuts.append((int(placement.dim), int(getattr(placement, "split_factor", 1))))
        else:
            return None
    return tuple(cuts)


@lru_cache(maxsize=_LAYOUTS_MAX)
def _announced_order(shard_order: tuple[Any, ...] | None) -> tuple[int, ...] | None:
    """Return the mesh dimensions in the order in which they cut, as the spec records it; dimensions are independent."""
    if not shard_order:
        return None
    return tuple(int(mesh_dim) for entry in shard_order for mesh_dim in entry.mesh_dims)


@lru_cache(maxsize=_LAYOUTS_MAX)
def _order(cuts: Cuts, mesh_shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the mesh dimensions in the order in which they cut; None where a split factor is that of no order.

    A split factor is the product of the mesh dimensions right of it that cut the same dimension before it.
    """
    ordered: dict[int, list[int]] = {}
    for mesh_dim in reversed(range(len(cuts))):
        cut = cuts[mesh_dim]
        if cut is None:
            continue
        dim, factor = cut
        before = ordered.setdefault(dim, [])
        products = list(itertools.accumulate((mesh_shape[m] for m in before), lambda a, b: a * b, initial=1))
        if factor not in products:
            return None
        before.insert(products.index(factor), mesh_dim)
    return tuple(mesh_dim for mesh_dims in ordered.values() for mesh_dim in mesh_dims)


@lru_cache(maxsize=_LAYOUTS_MAX)
def _layout(
    whole: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    cuts: Cuts,
    order: tuple[int, ...] | None,
) -> _Layout | None:
    """Return what the rank at `coordinate` holds.

    Without an order strided cuts go from left to right, and must be even; None where they are not: what torch makes of
    these differs from version to version.
    """
    runs: list[Runs] = [((0, size),) for size in whole]
    steps = [(mesh_dim, 1) for mesh_dim in order] if order is not None else _left_to_right(cuts)
    for mesh_dim, factor in steps:
        cut = cuts[mesh_dim]
        assert cut is not None
        dim, count = cut[0], mesh_shape[mesh_dim]
        if factor > 1 and _size(runs[dim]) % (factor * count):
            return None
        chunks = [_chunk(runs[dim], count=factor, index=index) for index in range(factor)]
        runs[dim] = _joined([run for chunk in chunks for run in _chunk(chunk, count=count, index=coordinate[mesh_dim])])
    box_number, replica_index, replicas_count = 0, 0, 1
    for cut, count, index in zip(cuts, mesh_shape, coordinate, strict=True):
        if cut is None:
            replica_index, replicas_count = replica_index * count + index, replicas_count * count
        else:
            box_number = box_number * count + index
    return _Layout(
        runs=tuple(runs),
        shape=tuple(map(_size, runs)),
        box_number=box_number,
        replica_index=replica_index,
        replicas_count=replicas_count,
    )


def _left_to_right(cuts: Cuts) -> list[tuple[int, int]]:
    return [(mesh_dim, cut[1]) for mesh_dim, cut in enumerate(cuts) if cut is not None]


def _size(runs: Runs) -> int:
    return sum(size for _, size in runs)


def _chunk(runs: Runs, *, count: int, index: int) -> Runs:
    """Return chunk `index` of `count` of what the runs hold one after the other, cut like torch.chunk cuts."""
    total = _size(runs)
    step = -(-total // count)
    first, last = min(total, step * index), min(total, step * (index + 1))
    found = []
    behind = 0
    for begin, size in runs:
        low, high = max(first, behind), min(last, behind + size)
        if low < high:
            found.append((begin + low - behind, high - low))
        behind += size
    if not found:  # An empty run has a place too: an empty tensor has a shape.
        return ((min((begin for begin, _ in runs), default=0), 0),)
    return tuple(found)


def _joined(runs: list[tuple[int, int]]) -> Runs:
    """Join runs that follow one another, and leave empty ones out unless there is nothing else."""
    joined: list[tuple[int, int]] = []
    for begin, size in runs:
        if size == 0:
            continue
        if joined and sum(joined[-1]) == begin:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((begin, size))
    return tuple(joined) or (runs[0],)
