"""Look into a directory of RecIS: what RecIS' CheckpointReader does, by the same names."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch

from asyncckpt.arguments import check_type
from asyncckpt.errors import NotFoundError
from asyncckpt.formats.data_files import read_arrays
from asyncckpt.formats.recis.directory import RecisDirectory, StoredArray
from asyncckpt.model.enough_memory import enough_memory
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.directory import check_path


class CheckpointReader:
    """The tensors of a checkpoint of RecIS by name: `table@slot`, all slices of it, or a dense one's name.

    Keeps the files open: close it, or use it as a context manager. Raises what opening raises: NotFoundError,
    CorruptError, UnsupportedError, IOFailedError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._directory = RecisDirectory.open(check_path(path))
        self._arrays: dict[str, list[StoredArray]] = {}
        for array in self._directory.arrays:
            self._arrays.setdefault(array.block.tensor_name, []).append(array)

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._directory.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tensor_names(self) -> list[str]:
        """Return all names: those of tables, their ids first, then the dense ones."""
        return list(self._arrays)

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return a shape; a slot has the rows of all slices. NotFoundError."""
        arrays = self._find(name)
        shape = arrays[0].shape
        return shape if len(arrays) == 1 else (sum(array.shape[0] for array in arrays), *shape[1:])

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Return a dtype. NotFoundError."""
        return self._find(name)[0].dtype.dtype

    @uninterrupted
    def read_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, for a slot the rows of all slices in order. NotFoundError, CorruptError, IOFailedError."""
        shape, dtype = self.tensor_shape(name), self.tensor_dtype(name)
        size, path = math.prod(shape) * dtype.itemsize, str(self._directory.path)
        with enough_memory(f"tensor {name!r} of {path!r}, {size} bytes"):
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
        at = tensor.data_ptr()
        wanted = []
        for array in self._find(name):
            wanted.append((array, 0, array.bytes, at))
            at += array.bytes
        read_arrays(self._directory, wanted)
        return tensor

    def _find(self, name: str) -> Sequence[StoredArray]:
        check_type("name", name, str)
        if name not in self._arrays:
            what = f"there is no tensor {name!r} in {str(self._directory.path)!r}"
            raise NotFoundError(what, found=sorted(self._arrays)[:16])
        return self._arrays[name]
