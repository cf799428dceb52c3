"""What one rank of a job holds of a state that is known in full: tables, spread tensors, replicas, optimizers, values.

Every bit follows from names and ids. So a rank can fill what it holds, and check it, without asking anybody.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.data import DataLoader

import asyncckpt
from asyncckpt.adapters import FixedTable
from asyncckpt.model.sharded import Piece, Sharded
from asyncckpt.plan.sharded_leaves import as_sharded
from asyncckpt.trainer_state import DataPosition, ResumableSampler, RngState, StepCounter, TrainerState
from tests.worlds.bits import raw_of

EXTREMES = [-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 2, 2**63 - 1]
USERS = np.unique(
    np.concatenate([np.random.default_rng(5).integers(-(2**63), 2**63 - 1, 2000), np.arange(-60, 60), EXTREMES])
).astype(np.int64)
FEW = np.arange(0, 600, 12, dtype=np.int64)  # Of 2, 3 or 4 shards only the first has any.
PAGES, LINES = 23, 2  # Rows of the tables by ranges; of LINES some ranks have none.
DIM = 5
SAMPLES = 1000
DTYPES = {
    "columns": torch.bfloat16,
    "few_rows": torch.float64,
    "deep": torch.int8,
    "half": torch.complex64,
    "back": torch.bool,
}
# Over a mesh of one dimension, and of two.
LINE: Mapping[str, tuple[tuple[int, ...], list[Placement]]] = {
    "rows": ((7, 3), [Shard(0)]),
    "columns": ((3, 5), [Shard(1)]),
    "few_rows": ((2, 4), [Shard(0)]),
    "copies": ((4, 3), [Replicate()]),
    "scalar": ((), [Replicate()]),
    "nothing": ((0, 3), [Shard(0)]),
    "deep": ((3, 5, 4), [Shard(2)]),
}
GRID: Mapping[str, tuple[tuple[int, ...], list[Placement]]] = {
    "boxes": ((5, 6), [Shard(0), Shard(1)]),
    "twice": ((9,), [Shard(0), Shard(0)]),
    "half": ((6, 4), [Replicate(), Shard(0)]),
    "back": ((3, 7, 5), [Shard(2), Shard(1)]),
    "thin": ((1, 3), [Shard(0), Shard(1)]),
}


def whole(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The tensor of a name: random bits, among them those of NaNs."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.empty(0, dtype=dtype).element_size()
    count = int(np.prod(shape, dtype=np.int64))
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def rows_of(ids: np.ndarray[Any, Any], column: str, width: int) -> torch.Tensor:
    """The rows of ids in a column of a table, float32 [n, width]: any bits."""
    words = ids.astype(np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15) + np.arange(width, dtype=np.uint64)
    words = (words ^ (words >> np.uint64(29))) * np.uint64(zlib.crc32(column.encode()) | 1)
    return torch.from_numpy((words >> np.uint64(32)).astype(np.uint32).view(np.float32))


def mine(ids: np.ndarray[Any, Any], rank: int, ranks_count: int) -> np.ndarray[Any, Any]:
    return ids[ids.view(np.uint64) % np.uint64(ranks_count) == np.uint64(rank)]


def box_of(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    ends = zip(piece.begin, piece.tensor.shape, strict=True)
    return tensor[tuple(slice(begin, begin + size) for begin, size in ends)]


class RankObjects:
    """One rank's objects, not filled yet. `line` and `grid` are meshes of its ranks of one and two dimensions."""

    def __init__(self, rank: int, ranks_count: int, line: DeviceMesh, grid: DeviceMesh) -> None:
        self.rank, self.ranks_count = rank, ranks_count
        slots = {"sum": torch.float32, "age": (torch.float32, ())}
        shard = (rank, ranks_count)
        self.user = asyncckpt.HashTable("user", DIM, optimizer_slots=slots, shard=shard)
        self.few = asyncckpt.HashTable("few", DIM, optimizer_slots=slots, shard=shard)
        self.none = asyncckpt.HashTable("none", 2, shard=shard)
        self.ranges = {"page": self._range(PAGES), "line": self._range(LINES)}
        self.spread: dict[str, Any] = {}
        for specs, mesh in ((LINE, line), (GRID, grid)):
            for name, (shape, placements) in specs.items():
                self.spread[name] = _blank(name, shape, mesh, placements)
        self.spread["strided"] = _strided(grid)
        # Every rank along the other dimension holds the same box, and its mesh does not tell.
        self.spread["sub"] = _blank("sub", (5, 3), grid["data"], [Shard(0)])
        self.spread["whole"] = _blank("whole", (70, 50), grid["tensor"], [Replicate()])
        self.own = _own(rank, ranks_count)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        self.adamw = torch.optim.AdamW(self.model.parameters())
        spread = {"w": _blank("w", (7, 3), line, [Shard(0)]), "v": _blank("v", (5, 6), grid, [Shard(0), Shard(1)])}
        self.spread_model = torch.nn.ParameterDict({name: torch.nn.Parameter(leaf) for name, leaf in spread.items()})
        self.spread_adamw = torch.optim.AdamW(self.spread_model.parameters())
        self.replica = torch.zeros(11, 3)
        self.empty = torch.zeros(0, 3)
        loader = DataLoader(range(SAMPLES), sampler=ResumableSampler(SAMPLES, rank=rank, ranks_count=ranks_count))
        self.rng = RngState(rank=rank, ranks_count=ranks_count)
        self.trainer = TrainerState(StepCounter(), self.rng, DataPosition(loader))

    def tables(self) -> dict[str, Any]:
        fixed = {
            name: FixedTable(name, lambda c=columns: c, first_id=first, ids_end=count)
            for name, (columns, first, count) in self.ranges.items()
        }
        return {"user": self.user, "few": self.few, "none": self.none, **fixed}

    def state(self) -> dict[str, Any]:
        return {
            "spread": self.spread,
            "own": self.own,
            "model": self.model,
            "adamw": self.adamw,
            "spread_model": self.spread_model,
            "spread_adamw": self.spread_adamw,
            "replica": self.replica,
            "empty": self.empty,
            "trainer": self.trainer,
            "epoch": 3,
            "big": 2**70,
            "mine": self.rank,
            "saved_by": self.ranks_count,
        }

    def fill(self) -> None:
        """Give everything its bits."""
        for table, ids in ((self.user, USERS), (self.few, FEW)):
            _insert(table, mine(ids, self.rank, self.ranks_count))
        for name, (columns, first, _) in self.ranges.items():
            ids = np.arange(first, first + len(columns["embedding"]))
            for column, tensor in columns.items():
                tensor.copy_(rows_of(ids, f"{name}.{column}", tensor.shape[1]))
        for optimizer, step in ((self.adamw, 3.0), (self.spread_adamw, 4.0)):
            for parameter in optimizer.param_groups[0]["params"]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": torch.tensor(step), **moments}
            optimizer.param_groups[0]["lr"] = step / 7
        for name, tensor in self._tensors():
            for piece, bits_of_piece in _pieces(name, tensor):
                piece.copy_(bits_of_piece)
        self.trainer.step.value = 77
        assert self.trainer.data is not None
        self.trainer.data.load_state_dict({**self.trainer.data.state_dict(), "epoch": 2, "samples_consumed": 345})

    def perturb(self) -> None:
        """Change much of it, so that it has to be written again: rows, ids, tensors."""
        for table, ids in ((self.user, USERS), (self.few, FEW)):
            some = mine(ids, self.rank, self.ranks_count)[::3]
            if len(some):
                table.remove(torch.from_numpy(some[::2]))
                table.insert(torch.from_numpy(some[1::2]), torch.zeros(len(some[1::2]), DIM))
            gone = np.arange(7000, 7100) * self.ranks_count + self.rank
            table.insert(torch.from_numpy(gone), torch.ones(len(gone), DIM))
        for columns, _, _ in self.ranges.values():
            columns["embedding"][1::2] = 0.0
        for name, tensor in self._tensors():
            for piece, _ in _pieces(name, tensor):
                piece.zero_()

    def restore(self) -> None:
        """Undo `perturb`."""
        for table in (self.user, self.few):
            table.remove(torch.from_numpy(np.arange(7000, 7100) * self.ranks_count + self.rank))
        self.fill()

    def check(self) -> None:
        """Every bit is there, and nothing else. On all ranks this is the whole state."""
        for table, ids in ((self.user, USERS), (self.few, FEW), (self.none, USERS[:0])):
            expected = np.sort(mine(ids, self.rank, self.ranks_count))
            found = table.ids()
            assert sorted(found.tolist()) == expected.tolist(), table
            rows = table.used_rows()
            for column in ("embedding", "sum", "age") if len(ids) else ():
                values = table.embedding[rows] if column == "embedding" else table.slot(column)[rows]
                width = values[0].numel() if len(values) else 1
                wanted = rows_of(found.numpy(), f"{table.name}.{column}", width)
                assert raw_of(values) == raw_of(wanted), (table, column)
        for name, (columns, first, _) in self.ranges.items():
            ids = np.arange(first, first + len(columns["embedding"]))
            for column, tensor in columns.items():
                assert raw_of(tensor) == raw_of(rows_of(ids, f"{name}.{column}", tensor.shape[1])), (name, column)
        for name, tensor in self._tensors():
            for piece, expected_bits in _pieces(name, tensor):
                assert raw_of(piece) == raw_of(expected_bits), name
        for optimizer, step in ((self.adamw, 3.0), (self.spread_adamw, 4.0)):
            assert optimizer.param_groups[0]["lr"] == step / 7
            for parameter in optimizer.param_groups[0]["params"]:
                state = optimizer.state[parameter]
                assert state["step"].item() == step
                for moment in (state["exp_avg"], state["exp_avg_sq"]):
                    assert (type(moment), moment.shape) == (type(parameter.data), parameter.shape)
                    if isinstance(moment, DTensor):
                        assert moment.placements == parameter.placements
        assert int(self.trainer.step) == 77
        assert self.trainer.data is not None
        assert (self.trainer.data.epoch, self.trainer.data.samples_consumed) == (2, 345)

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        yield from self.spread.items()
        yield "own", self.own
        yield "replica", self.replica
        yield from self.model.state_dict().items()
        yield from self.spread_model.items()
        for name, optimizer in (("adamw", self.adamw), ("spread_adamw", self.spread_adamw)):
            for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
                for moment in ("exp_avg", "exp_avg_sq"):
                    yield f"{name}.{number}.{moment}", optimizer.state[parameter][moment]

    def _range(self, count: int) -> tuple[dict[str, torch.Tensor], int, int]:
        step = -(-count // self.ranks_count)
        first = min(count, step * self.rank)
        size = min(count, first + step) - first
        return {"embedding": torch.zeros(size, 4), "sum": torch.zeros(size, 1)}, first, count


def _insert(table: asyncckpt.HashTable, ids: np.ndarray[Any, Any]) -> None:
    name = table.name
    table.insert(
        torch.from_numpy(ids),
        rows_of(ids, f"{name}.embedding", DIM),
        sum=rows_of(ids, f"{name}.sum", DIM),
        age=rows_of(ids, f"{name}.age", 1).reshape(-1),
    )


def _blank(name: str, shape: tuple[int, ...], mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    tensor = torch.zeros(shape, dtype=DTYPES.get(name, torch.float32))
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def _strided(grid: DeviceMesh) -> DTensor:
    """As FSDP2 leaves a parameter that is spread over tensor parallel ranks, unevenly."""
    tensor = torch.zeros(13, 2)
    coordinate = grid.get_coordinate()
    assert coordinate is not None
    data, tensor_rank = coordinate
    local = tensor.chunk(grid.size(1))[tensor_rank].chunk(grid.size(0))[data].clone()
    first = Shard(0) if grid.size(1) == 1 else _StridedShard(0, split_factor=grid.size(1))
    placements = [first, Shard(0)]
    return DTensor.from_local(local, grid, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def _own(rank: int, ranks_count: int) -> Sharded:
    """Ten rows of six columns, cut as no mesh cuts: uneven columns, in two pieces each."""
    edges = [6 * index * index // ranks_count**2 for index in range(ranks_count + 1)]
    width = edges[rank + 1] - edges[rank]
    pieces = tuple(Piece(torch.zeros(stop - row, width), (row, edges[rank])) for row, stop in ((0, 4), (4, 10)))
    return Sharded(whole_shape=(10, 6), dtype=torch.float32, pieces=pieces)


def _pieces(name: str, tensor: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What is here of a tensor, and the bits that belong there."""
    seen = as_sharded(tensor, name)
    if seen is None:
        yield tensor.detach(), whole(name, tuple(tensor.shape), tensor.dtype)
        return
    for piece in seen.pieces:
        yield piece.tensor, box_of(whole(name, seen.whole_shape, seen.dtype), piece)
