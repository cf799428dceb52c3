"""What restore asks of the shard room."""

from __future__ import annotations

from typing import Protocol

from asyncckpt.format.manifest import BlockFacts


class BlockReader(Protocol):
    """Reads blocks of the checkpoint by their numbers."""

    def add(self, number: int, address: int, *, begin: int, bytes: int) -> None:
        """Queue a read of bytes [begin, begin + bytes) of a block to an address."""
        ...

    def run(self) -> None:
        """Do all queued reads; whole blocks are verified."""
        ...

    def block(self, number: int) -> BlockFacts: ...
    def check(self, number: int, digest: bytes) -> None:
        """CorruptError unless the block has this digest."""
        ...

    def pass_over(self, number: int) -> None:
        """Nothing of a block counts: it is not going to be read."""
        ...

    @property
    def verify(self) -> bool: ...
