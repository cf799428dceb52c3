"""States that are converted, and what it means that two of them are the same."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from tests.worlds.bits import raw_of


def tree_state() -> dict[str, Any]:
    """Keys that are no text, tuples, lists, ties, views, odd shapes and dtypes, and an optimizer's state."""
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    whole = torch.arange(12.0).reshape(3, 4)
    return {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "tied": {"head": whole, "embedding": whole, "part": whole[1:]},
        "keys": {0: torch.zeros(2), 1.5: "float", None: (), True: [1, (2.5, {"a": b"raw"})]},
        "odd": [torch.tensor(7), torch.empty(0, 3), torch.arange(6).reshape(2, 3).t(), (torch.ones(1), "text")],
        "dtypes": {str(dtype): torch.ones(3, dtype=dtype) for dtype in (torch.bool, torch.bfloat16, torch.complex64)},
        "ordered": OrderedDict(b=1, a=torch.ones(2, dtype=torch.int8)),
        "epoch": 3,
        "empty": {},
    }


def same(found: Any, expected: Any) -> bool:
    """Bit for bit, types and order included."""
    if isinstance(expected, torch.Tensor):
        return (
            isinstance(found, torch.Tensor)
            and (found.dtype, found.shape) == (expected.dtype, expected.shape)
            and raw_of(found) == raw_of(expected)
        )
    if type(found) is not type(expected):
        return False
    if isinstance(expected, dict):
        pairs = zip(found.items(), expected.items(), strict=False)
        return len(found) == len(expected) and all(repr(a) == repr(b) and same(x, y) for (a, x), (b, y) in pairs)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)
