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
    memory_offset: int = 0

    @property
    def offsets(self) -> tuple[int, ...]:
        return self.type_offset, self.tensor_offset, self.keys_offset, self.memory_offset


@dataclass(frozen=True)
class PythonCalls:
    """How to look into objects of Python, as ac_python: addresses of functions in their order there, and an offset."""

    functions: tuple[int, ...]
    type_offset: int


@dataclass(frozen=True)
class TensorFacts:
    """What tensors are: TENSOR [n], and the shapes and strides that it points to, int64. ValueError unless it does."""

    tensors: Tensors
    shapes: NDArray[np.int64]

    def __post_init__(self) -> None:
        tensors, shapes = self.tensors, self.shapes
        if tensors.dtype != TENSOR or shapes.dtype != np.int64 or (tensors.ndim, shapes.ndim) != (1, 1):
            raise ValueError("known tensors or their shapes are not of these dtypes, or not lists")
        if not (tensors.flags.c_contiguous and shapes.flags.c_contiguous):
            raise ValueError("known tensors or their shapes do not lie one behind the other")
        ends = tensors["shape"].astype(np.int64) + 2 * tensors["dim"].astype(np.int64)
        outside = len(tensors) and max(int(tensors["shape"].max()), int(ends.max())) > len(shapes)
        if outside or (len(tensors) and int(tensors["dim"].min()) < 0):
            raise ValueError("the shape of a known tensor is not among the shapes")
        for array in (tensors, shapes):
            array.flags.writeable = False

    def check_objects(self, objects: NDArray[Any]) -> None:
        """Raise ValueError unless there is one object for each tensor."""
        if objects.dtype != object or objects.shape != self.tensors.shape or not objects.flags.c_contiguous:
            raise ValueError(f"there are {objects.shape} objects and {self.tensors.shape} known tensors")
