"""A source that has given its last byte holds no window any longer, however many sources there are."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import torch

import asyncckpt
from asyncckpt.commit.chain import read_chain
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.native import Progress
from asyncckpt.shard.reader import ChainReader
from asyncckpt.shard.stored_rows import plain_source, stored_source

COUNT, ROWS = 30, 1 << 17


def test_windows_go_with_the_last_byte(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "run", {str(number): torch.ones(ROWS) for number in range(COUNT)}, 1)
    some = np.arange(0, ROWS, 2)
    with CheckpointRoot.for_reading(tmp_path / "run") as root:
        chain = read_chain(root, 1)
        with ChainReader(root.data, chain, threads=1, verify=False, progress=Progress()) as reader:
            tracemalloc.start()
            try:
                kept = []
                for number in range(COUNT):
                    for make, rows in ((stored_source, None), (stored_source, some), (plain_source, some)):
                        source = make(reader, number, rows)
                        source.pieces(0, 4 * (ROWS if rows is None else len(rows)))
                        source.release()
                        kept.append(source)
                held = tracemalloc.get_traced_memory()[0]
            finally:
                tracemalloc.stop()
    assert held < 3 * 4 * ROWS
