"""Digests of everything that was trained, so that two runs can be compared bit for bit across processes.

Rows are taken in the order of their ids, for a resumed run may hold them in another order. Every column of every table
has its digest, every tensor and every plain value of the MLP and its optimizer too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from demo.model import Recommender, used_columns


def digests(recommender: Recommender) -> dict[str, str]:
    """Return name -> digest of all columns, tensors and values."""
    found: dict[str, str] = {}
    for table in recommender.tables.values():
        columns = used_columns(table)
        order = columns["id"].argsort()
        for name, rows in columns.items():
            found[f"{table.name}.{name}"] = _tensor_digest(rows[order])
    found.update(_state_digests("model", recommender.state["model"].state_dict()))
    found.update(_state_digests("optim", recommender.state["optim"].state_dict()))
    found["step"] = repr(recommender.state["step"])
    return found


def differences(left: Mapping[str, str], right: Mapping[str, str]) -> list[str]:
    """Return the names that are not the same on both sides, sorted."""
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))


def _state_digests(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, torch.Tensor):
        yield prefix, _tensor_digest(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _state_digests(f"{prefix}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _state_digests(f"{prefix}.{index}", inner)
    else:
        yield prefix, repr(value)


def _tensor_digest(tensor: torch.Tensor) -> str:
    """Dtype, shape and 128 bits over the bytes: equal when and, in practice, only when the tensors are."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{tensor.dtype} {tuple(tensor.shape)} {xxhash.xxh3_128_hexdigest(data)}"
