"""Digests of blocks with those of their leaves: uint8 [rows, 16].

Each block has a row, its digest. Behind it are those of its leaves, where it has more than one: with these a part of
the block can be verified alone. See "The digest" of docs/format.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncckpt.model.block import DIGEST_BYTES, LEAF_BYTES
from asyncckpt.native.contract import I64, U8, U64


def row_begins(bytes: Sequence[int] | I64 | U64) -> I64:
    """Return at which row each block begins, and where the last one ends: int64 [blocks + 1]."""
    sizes = np.asarray(bytes, dtype=np.int64)
    counts = 1 + np.where(sizes > LEAF_BYTES, -(-sizes // LEAF_BYTES), 0)
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])


def joined_rows(bytes: U64, digests: U8, leaves: U8) -> U8:
    """Return the rows of blocks, from their digests (uint8 [blocks, 16]) and those of all leaves of all of them."""
    begins = row_begins(bytes)
    rows = np.empty((int(begins[-1]), DIGEST_BYTES), dtype=np.uint8)
    is_leaf = np.ones(len(rows), dtype=np.bool_)
    is_leaf[begins[:-1]] = False
    rows[begins[:-1]] = digests
    counts = -(-bytes.astype(np.int64) // LEAF_BYTES)
    rows[is_leaf] = leaves[np.repeat(counts > 1, counts)]
    return rows
