"""A process whose core has the address sanitizer: saves of tensors that move meanwhile, and a read as none must be.

python moving_tensors_sanitized.py LIBRARY FOLDER COUNT SEED KIND...   prints what was wrong, a line for each
python moving_tensors_sanitized.py LIBRARY FOLDER planted              reads behind a tensor that became smaller
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

LIBRARY, FOLDER, COUNT, *REST = sys.argv[1:]
load = ctypes.CDLL


def load_sanitized(path: Any, *arguments: Any, **options: Any) -> ctypes.CDLL:
    return load(LIBRARY if str(path).endswith("libasyncckpt.so") else path, *arguments, **options)


ctypes.CDLL = load_sanitized  # type: ignore[assignment,misc]

from asyncckpt.native import core  # noqa: E402
from asyncckpt.plan.dense_blocks import CopyWays  # noqa: E402
from tests.end_to_end.moving_tensors import CASES, mistakes  # noqa: E402


def read_behind() -> None:
    """Copy as many bytes as were planned from a tensor that has fewer now."""
    import numpy as np
    import torch

    planned, found, target = torch.zeros(10_000), torch.zeros(1000), torch.zeros(10_000)
    bytes = int(CopyWays.of([planned], lambda tensor: None).bytes[0])
    core.copy(np.array([[found.data_ptr(), target.data_ptr(), bytes]], dtype=np.uint64))


assert core.implementation == "native"
if COUNT == "planted":
    read_behind()
else:
    seed, *kinds = REST
    for kind, in_background in CASES:
        if kind in kinds:
            folder = Path(FOLDER) / f"{kind} {in_background}"
            for mistake in mistakes(folder, kind, in_background=in_background, count=int(COUNT), seed=int(seed)):
                print(mistake)
