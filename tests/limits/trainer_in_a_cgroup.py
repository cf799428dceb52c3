"""A trainer whose memory is limited: DIR EVERY SEED LEVELS, the last of its table.

It restores, trains a model and a table, and saves every EVERY steps; with inf it ends without a save.
"""

from __future__ import annotations

import math
import os
import random
import sys

import torch

import asyncckpt

STEPS = 9


def main(path: str, every: float, seed: int, levels: int) -> None:
    drawn = random.Random(seed)
    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.randn(1 << 20)) for _ in range(drawn.randint(2, 24))]
    model = torch.nn.ParameterList(parameters)
    kind = drawn.choice([torch.optim.AdamW, torch.optim.SGD])
    optimizer = kind(model.parameters(), lr=0.1)
    table: asyncckpt.HashTable | asyncckpt.MultiLevelTable = asyncckpt.HashTable("t", 16, capacity=1 << 18)
    if levels > 1:
        table = asyncckpt.MultiLevelTable("t", 16, cache_rows=1 << 14, capacity=1 << 18)
    deltas = drawn.choice([None, asyncckpt.DeltaPolicy()])
    keep = drawn.choice([None, 2])
    with asyncckpt.Checkpointer(
        path, every=every, keep=keep, deltas=deltas, on_error="warn", model=model, optimizer=optimizer, table=table
    ) as ckpt:
        for step in range(ckpt.restore(), STEPS):
            ids = torch.arange(step * 10_000, (step + 1) * 10_000)
            table.insert(ids, torch.full((len(ids), 16), float(step)))
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 0.01 * step)
            optimizer.step()
            ckpt.step(step)
        if every == math.inf:
            os._exit(0)
    print(asyncckpt.list_steps(path), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], math.inf if sys.argv[2] == "inf" else int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
