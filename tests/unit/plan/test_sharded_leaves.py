"""Boxes of DTensor and ShardedTensor: every rank of a mesh in turn, over torch's process group that sends nothing."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from asyncckpt.errors import UnsupportedError
from asyncckpt.model.sharded import Sharded, sharded
from asyncckpt.plan.sharded_leaves import as_sharded

pytestmark = pytest.mark.any_core


@contextmanager
def rank_of(rank: int, ranks_count: int) -> Iterator[None]:
    """This process as one rank of many that are not there."""
    dist.init_process_group("fake", rank=rank, world_size=ranks_count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def whole_tensor(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(tuple(shape))


def box_of(whole: torch.Tensor, begin: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    return whole[tuple(slice(first, first + size) for first, size in zip(begin, shape, strict=True))]


def seen_by_all(
    whole: torch.Tensor, mesh_shape: tuple[int, ...], placements: Sequence[Placement], salt: str = "weight"
) -> list[Sharded]:
    """What every rank of a mesh makes of its part of a tensor."""
    found = []
    ranks_count = math.prod(mesh_shape)
    for rank in range(ranks_count):
        with rank_of(rank, ranks_count):
            mesh = init_device_mesh("cpu", mesh_shape)
            leaf = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            seen = as_sharded(leaf, salt)
            assert seen is not None
            found.append(seen)
    return found


def check_cover(whole: torch.Tensor, seen: Sequence[Sharded]) -> None:
    """Every piece is the whole's at its place, and the writers hold every element once."""
    written = torch.zeros(whole.shape, dtype=torch.int64)
    for rank, leaf in enumerate(seen):
        assert leaf.whole_shape == tuple(whole.shape)
        assert leaf.dtype is whole.dtype
        for piece in leaf.pieces:
            assert torch.equal(piece.tensor, box_of(whole, piece.begin, piece.tensor.shape)), f"rank {rank}"
            if leaf.is_writer:
                box_of(written, piece.begin, piece.tensor.shape).add_(1)
    assert torch.equal(written, torch.ones_like(written))


@st.composite
def spreads(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Placement]]:
    """A shape, a mesh and placements, with chunks that are uneven and empty."""
    shape = tuple(draw(st.lists(st.integers(0, 11), min_size=1, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda m: math.prod(m) <= 8)))
    dims = st.integers(0, len(shape) - 1)
    placement = st.one_of(st.just(Replicate()), dims.map(Shard))
    return shape, mesh_shape, [draw(placement) for _ in mesh_shape]


@settings(max_examples=60, deadline=None)
@given(spreads())
def test_writers_cover_the_whole_once(spread: tuple[tuple[int, ...], tuple[int, ...], list[Placement]]) -> None:
    shape, mesh_shape, placements = spread
    whole = whole_tensor(shape)
    check_cover(whole, seen_by_all(whole, mesh_shape, placements))


@pytest.mark.parametrize("rows", [0, 1, 5, 8, 9, 16, 23])
@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (3, 2), (2, 4), (1, 3)])
def test_strided_shards_of_fsdp_over_tensor_parallel_ranks(rows: int, data: int, tensor: int) -> None:
    # FSDP2 cuts what tensor parallelism has cut before: the mesh's right dimension first.
    whole = whole_tensor((rows, 3))
    placements = [_StridedShard(0, split_factor=tensor), Shard(0)]
    seen = []
    for rank in range(data * tensor):
        with rank_of(rank, data * tensor):
            mesh = init_device_mesh("cpu", (data, tensor))
            local = held(held(whole, tensor, rank % tensor), data, rank // tensor)
            leaf = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            part = as_sharded(leaf, "weight")
            assert part is not None
            seen.append(part)
    check_cover(whole, seen)


def test_strided_shards_on_a_mesh_of_three_dimensions() -> None:
    # The split factors of both say: after the last dimension. Between them the left one comes first.
    whole = whole_tensor((13, 2))
    seen = []
    for rank, (left, middle, right) in enumerate(itertools.product(range(2), range(2), range(2))):
        with rank_of(rank, 8):
            mesh = init_device_mesh("cpu", (2, 2, 2))
            local = held(held(held(whole, 2, right), 2, left), 2, middle)
            placements = [_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2), Shard(0)]
            leaf = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=(2, 1))
            part = as_sharded(leaf, "weight")
            assert part is not None
            seen.append(part)
    check_cover(whole, seen)


def held(whole: torch.Tensor, count: int, index: int) -> torch.Tensor:
    chunks = whole.chunk(count)
    return chunks[index] if index < len(chunks) else whole[:0]


def test_a_strided_shard_alone_is_several_boxes() -> None:
    whole = whole_tensor((12, 2))
    seen = seen_by_all(whole, (2,), [_StridedShard(0, split_factor=3)])
    assert [[piece.begin for piece in leaf.pieces] for leaf in seen] == [
        [(0, 0), (4, 0), (8, 0)],
        [(2, 0), (6, 0), (10, 0)],
    ]
    check_cover(whole, seen)


def test_an_uneven_strided_shard_alone_is_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"DTensor 'weight' is cut unevenly by a strided placement.*redistribute"
    ):
        seen_by_all(whole_tensor((13, 2)), (2,), [_StridedShard(0, split_factor=3)])


def test_the_order_of_cuts_of_the_spec_is_followed() -> None:
    spec = pytest.importorskip("torch.distributed.tensor._dtensor_spec")
    if not hasattr(spec, "ShardOrderEntry"):
        pytest.skip("this torch has no order of shards")
    whole = whole_tensor((7, 2))
    seen = []
    for rank in range(4):
        with rank_of(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2))
            local = held(held(whole, 2, rank % 2), 2, rank // 2)
            leaf = DTensor.from_local(
                local, mesh, [Shard(0), Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
            leaf._spec.shard_order = (spec.ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
            part = as_sharded(leaf, "weight")
            assert part is not None
            seen.append(part)
    check_cover(whole, seen)


def test_torch_computes_the_same_boxes() -> None:
    utils = pytest.importorskip("torch.distributed.tensor._utils")
    compute = utils.compute_local_shape_and_global_offset
    placements = [Shard(0), Shard(1), Replicate(), Shard(0)]
    mesh_shape = (2, 3)
    for shape in ((1, 5), (5, 8), (8, 1)):
        for chosen in itertools.product(placements, repeat=2):
            for rank, leaf in enumerate(seen_by_all(whole_tensor(shape), mesh_shape, chosen)):
                with rank_of(rank, 6):
                    local_shape, begin = compute(shape, init_device_mesh("cpu", mesh_shape), chosen)
                boxes = [(tuple(piece.tensor.shape), piece.begin) for piece in leaf.pieces]
                assert boxes == ([] if 0 in local_shape else [(tuple(local_shape), tuple(begin))])


def test_writers_are_spread_over_the_replicas() -> None:
    whole = whole_tensor((8, 2))
    counts = [0] * 4
    for number in range(40):
        for rank, leaf in enumerate(seen_by_all(whole, (4,), [Replicate()], salt=f"layer.{number}.weight")):
            counts[rank] += leaf.is_writer
    assert sum(counts) == 40
    assert min(counts) >= 4


def test_boxes_of_one_tensor_have_different_writers() -> None:
    # One huge tensor on a mesh of 2 replicas of 2 shards: not both boxes from the same replica.
    seen = seen_by_all(whole_tensor((8, 2)), (2, 2), [Replicate(), Shard(0)])
    assert len({rank // 2 for rank, leaf in enumerate(seen) if leaf.is_writer}) == 2


def test_pieces_share_memory_with_the_tensor_and_have_no_gradient() -> None:
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        leaf = torch.nn.Parameter(distribute_tensor(whole_tensor((4, 2)), mesh, [Shard(0)], src_data_rank=None))
        seen = as_sharded(leaf, "weight")
        assert seen is not None
        (piece,) = seen.pieces
        assert type(piece.tensor) is torch.Tensor
        assert piece.tensor.data_ptr() == leaf._local_tensor.data_ptr()
        assert not piece.tensor.requires_grad


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    with rank_of(2, 3):
        mesh = DeviceMesh("cpu", [0, 1])
        leaf = distribute_tensor(whole_tensor((4, 2)), mesh, [Shard(0)], src_data_rank=None)
        assert as_sharded(leaf, "weight") == Sharded(whole_shape=(4, 2), dtype=torch.float32, pieces=())


def test_each_rank_of_a_smaller_mesh_may_be_the_writer() -> None:
    """Those that save may be others, as many: they agree upon it."""
    for rank in range(2):
        with rank_of(rank, 3):
            leaf = distribute_tensor(whole_tensor((4, 2)), DeviceMesh("cpu", [0, 1]), [Replicate()], src_data_rank=None)
            seen = as_sharded(leaf, "weight")
            assert seen is not None
            assert (seen.is_writer, seen.spread_over) == (True, 0)


def test_a_tensor_outlives_its_process_group() -> None:
    with rank_of(0, 1):
        leaf = distribute_tensor(whole_tensor((4, 2)), init_device_mesh("cpu", (1,)), [Shard(0)], src_data_rank=None)
    seen = as_sharded(leaf, "weight")
    assert seen is not None
    assert (seen.is_writer, seen.boxes) == (True, [((0, 0), (4, 2))])


def test_an_empty_whole_is_known_on_every_rank() -> None:
    for leaf in seen_by_all(torch.zeros(0, 3), (2,), [Shard(0)]):
        assert [tuple(piece.tensor.shape) for piece in leaf.pieces] == [(0, 3)]


def test_scalars_are_replicas() -> None:
    seen = seen_by_all(torch.tensor(7.0), (3,), [Replicate()])
    assert [leaf.pieces[0].begin for leaf in seen] == [(), (), ()]
    assert sum(leaf.is_writer for leaf in seen) == 1


def test_partial_values_are_refused() -> None:
    with rank_of(0, 2):
        leaf = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()], run_check=False)
        with pytest.raises(UnsupportedError, match=r"'weight' has a placement that cannot be saved.*redistribute"):
            as_sharded(leaf, "weight")


def test_shards_of_ones_own_sizes_are_refused() -> None:
    # from_local may be told sizes that no placement makes: 1 and 3 rows of 4.
    with rank_of(0, 2):
        leaf = DTensor.from_local(
            torch.ones(1, 2), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False, shape=torch.Size([4, 2]),
            stride=(2, 1),
        )  # fmt: skip
        with pytest.raises(UnsupportedError, match=r"found \(1, 2\), expected \(2, 2\).*asyncckpt.Sharded"):
            as_sharded(leaf, "weight")


def test_several_local_shards_behind_one_dtensor() -> None:
    # TorchRec's column-wise tables: a DTensor whose local tensor is a list of boxes.
    wrapper = pytest.importorskip("torch.distributed.tensor._shards_wrapper").LocalShardsWrapper
    whole = whole_tensor((4, 6))
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        local = wrapper([whole[:, 0:2], whole[:, 4:5]], [(0, 0), (0, 4)])
        leaf = DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=whole.shape, stride=whole.stride())
        seen = as_sharded(leaf, "table")
        assert seen is not None
        assert [piece.begin for piece in seen.pieces] == [(0, 0), (0, 4)]
        assert all(torch.equal(p.tensor, box_of(whole, p.begin, p.tensor.shape)) for p in seen.pieces)


def sharded_tensor(shards: Sequence[tuple[torch.Tensor, list[int]]], whole: Sequence[int]) -> Any:
    local = [LocalShard.from_tensor_and_offsets(tensor, begin, 0) for tensor, begin in shards]
    metadata = ShardedTensorMetadata(
        shards_metadata=[shard.metadata for shard in local],
        size=torch.Size(whole),
        tensor_properties=TensorProperties(dtype=torch.float32),
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)


@pytest.mark.parametrize("whole_shape", [(6, 4), (6,)])
def test_a_sharded_tensor_tells_where_its_shards_are(whole_shape: tuple[int, ...]) -> None:
    whole = whole_tensor(whole_shape)
    places = [(slice(0, 2),), (slice(2, 6),)]
    with rank_of(0, 1):
        shards = [(whole[place], [place[0].start] + [0] * (len(whole_shape) - 1)) for place in places]
        seen = as_sharded(sharded_tensor(shards, whole_shape), "sums")
    assert seen is not None
    check_cover(whole, [seen])
    assert seen.pieces[1].tensor.data_ptr() == whole[2:].data_ptr()


def test_other_leaves_are_none_of_these() -> None:
    own = sharded(torch.ones(2), (0,), (4,))
    assert as_sharded(own, "x") is own
    for leaf in (torch.ones(2), torch.nn.Parameter(torch.ones(2)), 3, None):
        assert as_sharded(leaf, "x") is None


def test_torch_distributed_is_not_imported() -> None:
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "from asyncckpt.plan.sharded_leaves import as_sharded\n"
        "class Own(torch.Tensor): pass\n"
        "assert as_sharded(torch.ones(1).as_subclass(Own), 'x') is None\n"
        "print([name for name in set(sys.modules) - before if name.startswith('torch.distributed')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
