"""Where the bytes of a block come from when no arena holds them."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray


class ByteSource(Protocol):
    """The bytes of one block, in pieces that can be read by address."""

    def pieces(self, begin: int, end: int) -> NDArray[np.uint64]:
        """(address, bytes) of the byte range [begin, end), uint64 [k, 2]; valid until the next call."""
        ...


@runtime_checkable
class PassingSource(ByteSource, Protocol):
    """A source whose pieces lie in memory of its own, which is not needed for long."""

    def let_go(self) -> None:
        """The pieces that were given last have been copied: what holds them may go."""
        ...


@runtime_checkable
class FetchedSource(PassingSource, Protocol):
    """A source over memory of a device. What several of them are asked for next is best brought over together."""

    def lying(self, begin: int, end: int) -> torch.Tensor:
        """The tensor on a device in which the bytes [begin, end) lie; it may hold a few more."""
        ...

    def give(self, values: torch.Tensor) -> None:
        """The values of `lying(begin, end)`, contiguous on the CPU; `pieces(begin, end)` is asked for next."""
        ...
