"""What tree prints."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import asyncckpt
from tests.program import invoke


def test_a_tree_has_types_shapes_and_plain_values(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("user", 4)
    table.lookup(torch.arange(5))
    state = {"model": torch.nn.Linear(3, 2, bias=False), "seen": {7: ("a\n", 2.5)}}
    asyncckpt.save(tmp_path, state, hashtables={"user": table})
    assert invoke("tree", tmp_path).stdout == (
        "step 0\n"
        "  model: object of 1\n"
        "    weight: tensor float32 [2, 3]\n"
        "  seen: dict of 1\n"
        "    7: tuple of 2\n"
        "      0: 'a\\n'\n"
        "      1: 2.5\n"
        "  user: table, 5 rows\n"
        "    id: column int64\n"
        "    embedding: column float32 [4]\n"
    )
    answer = json.loads(invoke("tree", tmp_path, "--json").stdout)
    assert answer["step"] == 0
    assert {"path": ["seen", 7, 1], "kind": "value", "value": 2.5} in answer["entries"]
    assert {"path": ["model", "weight"], "kind": "tensor", "dtype": "float32", "shape": [2, 3]} in answer["entries"]
    assert {"path": ["user"], "kind": "table", "count": 5} in answer["entries"]
