"""What the stored directories hold: states of which every bit follows from names, ids and the step.

Nothing here may change once a directory was written: the bits are compared with those on disk.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import asyncckpt

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
]  # fmt: skip
DIM = 3
WHOLE = (7, 5)  # Of the tensor that is spread over ranks.
IDS = np.unique(np.concatenate([np.arange(-20, 60), [-(2**63), -(2**40) + 1, 2**40, 2**63 - 1]]))


def bits(name: str, shape: tuple[int, ...], dtype: torch.dtype, step: int) -> torch.Tensor:
    """Return a tensor of any bits, those of NaNs among them."""
    size = torch.empty(0, dtype=dtype).element_size()
    count = int(np.prod(shape, dtype=np.int64)) * size
    words = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(step)
    words = (words ^ (words >> np.uint64(31))) * np.uint64(zlib.crc32(name.encode()) | 1)
    raw = torch.tensor((words >> np.uint64(40)).astype(np.uint8).tolist(), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def model(step: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """Return a module, its optimizer and schedule, as they are after this step."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            tensor.copy_(torch.tensor(step) if tensor.dim() == 0 else bits(name, (*tensor.shape,), tensor.dtype, step))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    for index, parameter in enumerate(net.parameters()):
        names = ("exp_avg", "exp_avg_sq")
        moments = {name: bits(f"{name}{index}", (*parameter.shape,), torch.float32, step) for name in names}
        optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
    schedule.last_epoch = step
    return net, optimizer, schedule


def state(step: int) -> dict[str, Any]:
    """Return a state of one process: tensors of all dtypes, every kind of container and value, objects, ties."""
    net, optimizer, schedule = model(step)
    tied = bits("tied", (4, 6), torch.float32, step)
    tensors = {str(dtype): bits(str(dtype), (3, 2), dtype, step) for dtype in DTYPES}
    shapes = {"scalar": (), "empty": (0, 3), "deep": (2, 1, 3, 1)}
    return {
        "dtypes": {**tensors, "torch.bool": bits("bool", (3, 2), torch.uint8, step) > 99},
        "shapes": {name: bits(name, shape, torch.float32, step) for name, shape in shapes.items()},
        "tied": [tied, tied, tied[1:3]],
        "ordered": OrderedDict(b=bits("b", (2,), torch.float32, step), a=(bits("a", (1,), torch.int32, step), 4)),
        "arrays": {"array": bits("array", (4,), torch.float64, step).numpy(), "scalar": np.float32(step)},
        "model": net,
        "optimizer": optimizer,
        "schedule": schedule,
        "values": values(step),
    }


def values(step: int) -> dict[Any, Any]:
    """Return plain values and keys of every kind."""
    texts = ["", "\u00e9\x00", "a.b@c/d", b"\x00\xff", None, True]
    numbers = [step, -(2**70), 0.1, float("inf"), -0.0, 1 + 2j, torch.bfloat16, torch.device("cpu"), torch.Size([2, 3])]
    return {"texts": texts, "numbers": numbers, 5: (1, [2, {}]), None: (), True: [], 0.5: {"": OrderedDict()}}


def ids_at(step: int) -> np.ndarray[Any, Any]:
    """Return the ids of a table: each step lacks others."""
    return IDS[np.arange(len(IDS)) % 7 != step % 7]


def rows_of(ids: np.ndarray[Any, Any], column: str, width: int, step: int) -> torch.Tensor:
    """Return float32 rows [n, width]. Of three rows one is written at each step."""
    written = (ids.astype(np.uint64) % np.uint64(3) + np.uint64(step)) // np.uint64(3)
    words = ids.astype(np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15) + np.arange(width, dtype=np.uint64)
    words = (words ^ (words >> np.uint64(29))) * np.uint64(zlib.crc32(column.encode()) | 1)
    return torch.from_numpy((words >> np.uint64(40)).astype(np.float32) + written[:, None].astype(np.float32))


def tables(rank: int = 0, count: int = 1) -> dict[str, Any]:
    """Return empty tables: one of one level, and one of which some rows are in a cache."""
    slots: dict[str, Any] = {"sum": torch.float32, "age": (torch.float32, ())}
    shard = (rank, count)
    return {
        "user": asyncckpt.HashTable("user", DIM, optimizer_slots=slots, shard=shard),
        "item": asyncckpt.MultiLevelTable("item", DIM, cache_rows=20, optimizer_slots=slots, shard=shard, capacity=8),
    }


def fill(found: Mapping[str, Any], step: int) -> None:
    """Bring tables to what they hold at a step. Rows that are as they were are not written."""
    for name, table in found.items():
        ids = torch.from_numpy(ids_at(step))
        ids = ids[table.owns(ids)]
        had = table.ids()
        table.remove(had[~torch.isin(had, ids)])
        columns, before = (columns_of(name, ids.numpy(), at) for at in (step, step - 1))
        changed = ~torch.isin(ids, had) | (columns["age"] != before["age"])
        table.insert(
            ids[changed], columns["embedding"][changed], sum=columns["sum"][changed], age=columns["age"][changed]
        )


def columns_of(table: str, ids: np.ndarray[Any, Any], step: int) -> dict[str, torch.Tensor]:
    widths = {"embedding": DIM, "sum": DIM, "age": 1}
    found = {column: rows_of(ids, f"{table}.{column}", width, step) for column, width in widths.items()}
    found["sum"][torch.from_numpy(ids % 5 == 0)] = 0.0  # Such rows a filter may leave out.
    return {**found, "age": found["age"][:, 0]}


def rank_state(rank: int, count: int, step: int) -> dict[str, Any]:
    """Return what one of several ranks holds: its rows of a whole, a replica, a tensor and a value of its own."""
    whole = bits("whole", WHOLE, torch.float32, step)
    begin, end = (WHOLE[0] * at // count for at in (rank, rank + 1))
    piece = asyncckpt.Piece(whole[begin:end].clone(), (begin, 0))
    return {
        "whole": asyncckpt.Sharded(WHOLE, torch.float32, (piece,), spread_over=count),
        "replica": bits("replica", (6, 2), torch.int16, step),
        f"own.{rank}": bits(f"own.{rank}", (4,), torch.float64, step),
        "step": step,
    }
