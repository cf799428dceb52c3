"""Which dtypes a load with cast=True converts: floats to floats, integers to integers that hold all of theirs."""

from __future__ import annotations

import torch

from asyncckpt.format.encodings.cast import FLOATS, INTEGERS


def can_be_cast(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether numbers keep their values, but for rounding to a smaller float."""
    if stored in INTEGERS and wanted in INTEGERS:
        have, hold = torch.iinfo(stored), torch.iinfo(wanted)
        return hold.min <= have.min and have.max <= hold.max
    return stored in FLOATS and wanted in FLOATS
