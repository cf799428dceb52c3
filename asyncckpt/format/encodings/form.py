"""What the encodings share: the form of an array between two steps, and how they say that something does not fit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch

from asyncckpt.model.block import EncodingStep


class Stage(IntEnum):
    """How far an array has gone from what it was: a step may only follow those of earlier stages."""

    ARRAY = 0  # Rows are rows.
    PACKED = 1  # Rows of zeros are gone.
    COMPRESSED = 2


@dataclass(frozen=True)
class Form:
    """An array between two steps. `lane`: the bytes of one number, after which alike bytes come again."""

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
    """Values, or a kind of array, that a step cannot encode; `row` is the first such row, where it is one's."""

    def __init__(self, reason: str, *, row: int | None = None) -> None:
        super().__init__(reason)
        self.row = row


class Malformed(ValueError):
    """Recorded steps or stored bytes that no encoder has written."""


class Unknown(ValueError):
    """Recorded steps of a newer version."""


class Encoding(Protocol):
    """One kind of step."""

    @property
    def members(self) -> frozenset[str]:
        """Of a recorded step, beside `kind`."""
        ...

    def misfit(self, form: Form, step: EncodingStep) -> str | None:
        """Why the step cannot be done to such an array; None when it can."""
        ...

    def encode(self, values: torch.Tensor, form: Form, step: EncodingStep) -> tuple[torch.Tensor, EncodingStep] | None:
        """The contiguous stored values, and the step as recorded; None when they would not be smaller. Raises Unfit."""
        ...

    def stored(self, form: Form, step: EncodingStep) -> Form:
        """What a recorded step makes of an array; a lower bound of its bytes where these are only known afterwards.

        Raises Malformed or Unknown.
        """
        ...

    def decode(self, stored: torch.Tensor, form: Form, step: EncodingStep) -> torch.Tensor:
        """The array of `form` that was encoded, contiguous. Raises Malformed."""
        ...


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, uint8 [n]; shares its memory."""
    return values.reshape(-1).view(torch.uint8)


def integer(step: EncodingStep, member: str, *, at_least: int, at_most: int) -> int:
    """A number of a recorded step; Malformed when it is none, or out of its bounds."""
    value = step[member]
    if type(value) is not int or not at_least <= value <= at_most:
        raise Malformed(f"{member} is {value!r}, no integer in [{at_least}, {at_most}]")
    return value
