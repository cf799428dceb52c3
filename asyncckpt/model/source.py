"""Where the bytes of a block come from when no arena holds them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class ByteSource(Protocol):
    """The bytes of one block, in pieces that can be read by address."""

    def pieces(self, begin: int, end: int) -> NDArray[np.uint64]:
        """(address, bytes) of the byte range [begin, end), uint64 [k, 2]; valid until the next call."""
        ...
