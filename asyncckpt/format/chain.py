"""The manifests that one checkpoint is put together from, as one: blocks are numbered through all of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from asyncckpt.format.manifest import BlockFacts, Manifest


@dataclass(frozen=True)
class Chain:
    """Newest first: a full checkpoint's manifest alone, or a delta's with those of all it builds upon."""

    manifests: tuple[Manifest, ...]

    @property
    def newest(self) -> Manifest:
        return self.manifests[0]

    @property
    def step(self) -> int:
        return self.newest.step

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(manifest.step for manifest in self.manifests)

    @property
    def bytes_total(self) -> int:
        """Of all shard files."""
        return sum(manifest.bytes_total for manifest in self.manifests)

    @cached_property
    def blocks(self) -> tuple[BlockFacts, ...]:
        """All blocks of the newest manifest, then all of the next one, and so on. Its place here numbers a block."""
        return tuple(block for manifest in self.manifests for block in manifest.blocks)
