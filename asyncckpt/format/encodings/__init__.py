"""Other ways to store an array: smaller dtypes, quantized rows, without rows of zeros, compressed.

A block's `dtype` and `shape` tell the array that a loader gives; `encoding` lists the steps that made the stored bytes
of it, in the order of writing. `encode` does the steps, `decode` their inverses, from the last to the first.

    kind             members                       stored
    cast             dtype                         the same shape in a smaller dtype
    quantize         bits: 8 or 4                  uint8 [rows, codes, scale and bias of the row]
    skip_zero_rows   rows: how many are stored     uint8: a bitmap of the rows that are not all zero bytes, then these
    zstd             level; shuffle: bytes         uint8: one zstd frame of the shuffled bytes

Pure functions: nothing here reads or writes files, and nothing trusts a number of a file before it was checked against
the block's shape and size.
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
