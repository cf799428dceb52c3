"""A control: asyncckpt_steps that takes no digests of what it writes. Nothing could verify its checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import xxhash

from asyncckpt.native import DIGEST_BYTES, U8, U64, DrainOptions, FileImage, NativeCore, Progress, row_begins
from bench.peers.asyncckpt_steps import AsyncckptSteps
from bench.state import State


class AsyncckptNoDigests(AsyncckptSteps):
    def __init__(self, state: State, directory: Path) -> None:
        drain = NativeCore.drain

        def without_digests(
            core: NativeCore, files: Sequence[FileImage], spans: U64, options: DrainOptions, progress: Progress
        ) -> U8:
            drain(core, files, spans[:0], options, progress)
            return _made_up(spans)

        patch.object(NativeCore, "drain", without_digests).start()  # The process is this peer's alone.
        super().__init__(state, directory)


def _made_up(spans: U64) -> U8:
    """Return digests that a manifest may hold: those of blocks are those of their leaves'."""
    begins = row_begins(spans[:, 1])
    rows = np.zeros((int(begins[-1]), DIGEST_BYTES), dtype=np.uint8)
    for begin, end in itertools.pairwise(begins.tolist()):
        rows[begin] = np.frombuffer(xxhash.xxh3_128_digest(rows[begin + 1 : end].tobytes()), dtype=np.uint8)
    return rows


PEER = AsyncckptNoDigests
