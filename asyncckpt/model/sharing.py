"""Which leaves of a state share memory: `leaf` numbers tensors, arrays and scalars of a tree, as in a BlockSpec."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TiedLeaf:
    """A leaf without a block: the same elements in the same memory as leaf number `of`, which is stored for both."""

    name: str
    leaf: int
    of: int


@dataclass(frozen=True)
class SharedView:
    """Where a leaf is in memory that it shares: its first byte there, and its strides in elements."""

    leaf: int
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class SharedMemory:
    """So many bytes of memory that several leaves lie in, other than tied ones. Each has blocks of its own."""

    bytes: int
    views: tuple[SharedView, ...]


@dataclass(frozen=True)
class Sharing:
    """All that is shared in the state of one rank."""

    tied: tuple[TiedLeaf, ...] = ()
    memories: tuple[SharedMemory, ...] = ()


NOTHING_SHARED = Sharing()
