"""What the encodings share: the form of an array between two steps, and the errors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch

from asyncckpt.model.block import EncodingStep


class Stage(IntEnum):
    """How far an array is encoded: a step may only follow steps of earlier stages."""

    ARRAY = 0  # Rows are rows.
    PACKED = 1  # Rows of zeros are left out.
    COMPRESSED = 2


@dataclass(frozen=True)
class Form:
    """An array between two steps. `lane`: the bytes of one number, the period of similar bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    lane: int
    stage: Stage = Stage.ARRAY

    @staticmethod
    def of(dtype: torch.dtype, shape: tuple[int, ...]) -> Form:
        return Form(dtype=dtype, shape=shape, lane=dtype.itemsize)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class Unfit(ValueError):
    """Values, or a kind of array, that a step cannot encode; `row` is the first such row, if it is about rows."""

    def __init__(self, reason: str, *, row: int | None = None) -> None:
        super().__init__(reason)
        self.row = row


class Malformed(ValueError):
    """Recorded steps or stored bytes that no encoder writes."""


class Unknown(ValueError):
    """Recorded steps of a newer version."""


class Encoding(Protocol):
    """One kind of step."""

    @property
    def members(self) -> frozenset[str]:
        """The members of a recorded step besides `kind`."""
        ...

    def misfit(self, form: Form, step: EncodingStep) -> str | None:
        """Return why the step cannot be applied to such an array; None if it can."""
        ...

    def encode(self, values: torch.Tensor, form: Form, step: EncodingStep) -> tuple[torch.Tensor, EncodingStep] | None:
        """Return the contiguous stored values and the recorded step; None if not smaller. Raises Unfit."""
        ...

    def stored(self, form: Form, step: EncodingStep) -> Form:
        """Return the form after a recorded step, or a lower bound if its size is only known afterwards.

        Raises Malformed or Unknown.
        """
        ...

    def decode(self, stored: torch.Tensor, form: Form, step: EncodingStep) -> torch.Tensor:
        """Return the array of `form` that was encoded, contiguous. Raises Malformed."""
        ...


def integer(step: EncodingStep, member: str, *, at_least: int, at_most: int) -> int:
    """Return an integer member of a recorded step. Raises Malformed if it is not one, or out of bounds."""
    value = step[member]
    if type(value) is not int or not at_least <= value <= at_most:
        raise Malformed(f"{member} is {value!r}, no integer in [{at_least}, {at_most}]")
    return value
