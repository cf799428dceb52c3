"""Whole blocks that go to memory of the same bytes on a device: ranges of bytes, without a look at what they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from asyncckpt.devices.uploads import Uploads
from asyncckpt.model.block import BlockSpec
from asyncckpt.native.contract import U8


@dataclass(frozen=True)
class WholeScatter:
    """A block that is not encoded, and where it goes: a contiguous tensor of its shape and dtype on a device."""

    number: int
    target: torch.Tensor

    @property
    def targets(self) -> tuple[torch.Tensor, ...]:
        return (self.target,)

    def windows(self, spec: BlockSpec, *, bytes_max: int, whole: bool) -> Iterator[_Range]:
        """Ranges of bytes_max bytes."""
        for begin in range(0, spec.bytes, bytes_max):
            yield _Range(begin=begin, bytes=min(bytes_max, spec.bytes - begin), target=self.target)


@dataclass(frozen=True)
class _Range:
    """Bytes [begin, begin + bytes) of a block, and of its target."""

    begin: int
    bytes: int
    target: torch.Tensor

    def put(self, memory: U8, uploads: Uploads) -> None:
        uploads.put_bytes(self.target, self.begin, memory)
