"""Encodings of arrays: smaller dtypes, quantized rows, without rows of zeros, compressed.

A block's `dtype` and `shape` describe the array that a loader returns; `encoding` lists the steps that produced its
stored bytes, in the order of writing. `encode` applies the steps, `decode` their inverses, from the last to the first.

    kind             members                       stored
    cast             dtype                         the same shape in a smaller dtype
    quantize         bits: 8 or 4                  uint8 [rows, codes, scale and bias of the row]
    skip_zero_rows   rows: how many are stored     uint8: a bitmap of the rows that are not all zero bytes, then these
    zstd             level; shuffle: bytes         uint8: one zstd frame of the shuffled bytes

Pure functions: nothing here reads or writes files. No number from a file is trusted before it was checked against the
block's shape and size.
"""

from asyncckpt.format.encodings.codec import (
    ENCODED_BYTES_MAX,
    Encoded,
    StoredAs,
    check_encoding,
    decode,
    encode,
    misfit,
    stored_as,
)
from asyncckpt.format.encodings.form import Unfit

__all__ = [
    "ENCODED_BYTES_MAX",
    "Encoded",
    "StoredAs",
    "Unfit",
    "check_encoding",
    "decode",
    "encode",
    "misfit",
    "stored_as",
]
