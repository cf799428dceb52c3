"""What a core is told of torch's tensors, and says of them: the arrays of ac_tensors in csrc/include/asyncckpt.h."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The fields of ac_tensor and ac_tensor_place.
TENSOR = np.dtype(
    [
        *(("type", np.uint64), ("keys", np.uint64), ("shape", np.uint64), ("dim", np.int32), ("dtype", np.int32)),
        *(("device_type", np.int32), ("device_index", np.int32)),
    ]
)
PLACE = np.dtype([("address", np.uint64), ("offset", np.int64), ("storage_bytes", np.int64)])
Tensors = NDArray[np.void]
# [n]: the address of each first element, where that is in its storage (in elements), and the storage's size.
Places = NDArray[np.void]


@dataclass(frozen=True)
class TorchCalls:
    """How to read tensors in this process, as ac_torch: addresses of functions in their order there, and offsets."""

    functions: tuple[int, ...]
    type_offset: int
    tensor_offset: int
    keys_offset: int


@dataclass(frozen=True)
class PythonCalls:
    """How to look into objects of Python, as ac_python: addresses of functions in their order there, and an offset."""

    functions: tuple[int, ...]
    type_offset: int


def check_tensors(objects: NDArray[Any], known: Tensors, shapes: NDArray[np.int64]) -> None:
    """Raise ValueError unless there is one known tensor for each object, and `shapes` has what these point to."""
    fits = objects.dtype == object and known.dtype == TENSOR and shapes.dtype == np.int64
    if not (fits and objects.shape == known.shape == (len(known),) and objects.flags.c_contiguous):
        raise ValueError(f"there are {objects.shape} objects and {known.shape} known tensors, or not of these dtypes")
    if not (known.flags.c_contiguous and shapes.flags.c_contiguous and shapes.ndim == 1):
        raise ValueError("known tensors or their shapes do not lie one behind the other")
    if len(known):
        ends = known["shape"].astype(np.int64) + 2 * known["dim"].astype(np.int64)
        if int(known["dim"].min()) < 0 or int(known["shape"].max()) > len(shapes) or int(ends.max()) > len(shapes):
            raise ValueError("the shape of a known tensor is not among the shapes")
