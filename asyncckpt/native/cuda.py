"""The CUDA library: copies and fingerprints that are ordered on a stream of a device.

Callers who know that this process uses CUDA load it, never an import. csrc/include/asyncckpt_cuda.h says what each
call does and requires. Memory is given as an address (int), like `Tensor.data_ptr()`, a stream as its handle, like
`torch.cuda.Stream.cuda_stream`; the caller keeps memory alive until the stream has executed the call. No call on a
stream waits for the device, and each restores the current device of its thread. Any thread may call at any time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int32, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from asyncckpt.native.contract import U64, check_count, check_mark, check_table, checked_row_columns
from asyncckpt.native.declarations import OK, AcError, find_library, load
from asyncckpt.native.library import raise_error

CUDA_ABI_VERSION = 2
CUDA_LIBRARY_NAME = "libasyncckpt_cuda.so"

# In addition to the statuses of declarations.py.
DEVICE = 6

BESIDE_CAPTURES = 2

_ERROR = POINTER(AcError)

# Name -> (result, arguments); tests/unit/native/test_cuda_declarations.py compares them with the header.
CUDA_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ac_cuda_abi_version": (c_uint32, []),
    "ac_cuda_error_name": (c_char_p, [c_int32]),
    "ac_cuda_devices_count": (c_int32, [POINTER(c_int32), _ERROR]),
    "ac_cuda_usable": (c_int32, [c_int32, _ERROR]),
    "ac_cuda_new_stream": (c_int32, [c_int32, c_void_p, _ERROR]),
    "ac_cuda_exchange_capture_mode": (c_int32, [POINTER(c_int32), _ERROR]),
    "ac_cuda_host_register": (c_int32, [c_int32, c_void_p, c_uint64, _ERROR]),
    "ac_cuda_host_unregister": (c_int32, [c_int32, c_void_p, _ERROR]),
    "ac_cuda_copy": (c_int32, [c_int32, c_void_p, c_uint64, c_void_p, _ERROR]),
    "ac_cuda_batch_table_bytes": (c_uint64, [c_uint64]),
    "ac_cuda_copy_batch": (c_int32, [c_int32, c_void_p, c_uint64, c_void_p, c_void_p, c_void_p, _ERROR]),
    "ac_cuda_copy_rows": (
        c_int32,
        [c_int32, c_void_p, c_void_p, c_uint64, c_void_p, c_void_p, c_uint64, c_void_p, _ERROR],
    ),
    "ac_cuda_copy_marked_rows": (
        c_int32,
        [c_int32, c_void_p, c_void_p, c_uint64, c_void_p, c_uint8, c_uint64, c_void_p, _ERROR],
    ),
    "ac_cuda_fingerprint": (c_int32, [c_int32, c_void_p, c_uint64, c_uint64, c_void_p, c_void_p, _ERROR]),
}
_NO_CASTS = None  # All rows arrive as they are.


class DeviceFailure(Exception):
    """A call of CUDA failed. Often the device is lost to this process, and all later calls fail too.

    `name` and `number` are those of the cudaError_t, such as "cudaErrorIllegalAddress" and 700; `item` is the index of
    the segment that failed, 0 where there are none.
    """

    def __init__(self, message: str, *, name: str, number: int, item: int) -> None:
        super().__init__(message)
        self.name = name
        self.number = number
        self.item = item


def load_cuda_library(path: Path | None = None) -> CudaLibrary:
    """Load the CUDA library of this package, or the one at `path`; raises UnusableLibrary with the reason.

    Needs no driver. A library that loads does not imply a device: see `check_usable`.
    """
    if path is None:
        path = find_library(CUDA_LIBRARY_NAME, hint=": this package was built without a CUDA compiler")
    return CudaLibrary(load(path, CUDA_FUNCTIONS, version_function="ac_cuda_abi_version", version=CUDA_ABI_VERSION))


class CudaLibrary:
    """Each method checks its arrays and makes one C call.

    All but `batch_table_bytes` raise DeviceFailure for what CUDA reports, and ValueError for arguments that break the
    contract, before anything is launched.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def check_usable(self, device: int) -> None:
        """Load all kernels on a device. Raises DeviceFailure if this library has no code for it."""
        self._call(self._library.ac_cuda_usable, device)

    def new_stream(self, device: int) -> int:
        """Return a stream that nobody else has, of high priority; it lives as long as the process."""
        stream = c_void_p()
        self._call(self._library.ac_cuda_new_stream, device, byref(stream))
        assert stream.value is not None
        return stream.value

    @contextmanager
    def beside_captures(self) -> Iterator[None]:
        """Let this thread wait and allocate while another one captures a graph, without ending that capture."""
        mode = c_int32(BESIDE_CAPTURES)
        self._call(self._library.ac_cuda_exchange_capture_mode, byref(mode))
        try:
            yield
        finally:
            self._call(self._library.ac_cuda_exchange_capture_mode, byref(mode))

    def host_register(self, device: int, address: int, bytes: int) -> None:
        """Pin host memory for kernels of all devices; `address` must begin a page. Slow."""
        self._call(self._library.ac_cuda_host_register, device, address, bytes)

    def host_unregister(self, device: int, address: int) -> None:
        """Undo host_register, before the memory is unmapped or moved."""
        self._call(self._library.ac_cuda_host_unregister, device, address)

    def copy(self, device: int, segments: U64, stream: int) -> None:
        """Copy segments, uint64 [n, 3] of (source address, target address, bytes), one by one, in any direction."""
        check_table(segments, columns_count=3, name="segments")
        self._call(self._library.ac_cuda_copy, device, segments.ctypes.data, len(segments), stream)

    def batch_table_bytes(self, count: int) -> int:
        """Return the bytes of the table for `copy_batch` of `count` segments."""
        check_count(count, name="count")
        return int(self._library.ac_cuda_batch_table_bytes(count))

    def copy_batch(self, device: int, segments: U64, table: int, stream: int, *, device_table: int = 0) -> None:
        """Copy segments, uint64 [n, 3] as in `copy`, in one launch.

        table: address of registered host memory of batch_table_bytes(n), aligned to 8, filled by this call.
        device_table: address of as much memory of the device; the table is copied there first, which is faster.
        Both belong to this call until the stream has executed it.
        """
        check_table(segments, columns_count=3, name="segments")
        places = segments.ctypes.data, len(segments), table, device_table
        self._call(self._library.ac_cuda_copy_batch, device, *places, stream)

    def copy_rows(
        self, device: int, columns: U64, source_rows: int | None, target_rows: int | None, count: int, stream: int
    ) -> None:
        """Copy row source_rows[i] of every column to row target_rows[i], for i below `count`.

        columns: uint64 [c, 3] of (source address, target address, row bytes). The rows are addresses of int64 [count]
        that kernels can read, None for row i; pairs with a negative row are skipped.
        """
        check_table(columns, columns_count=3, name="columns")
        check_count(count, name="count")
        places = columns.ctypes.data, _NO_CASTS, len(columns)
        self._call(self._library.ac_cuda_copy_rows, device, *places, source_rows, target_rows, count, stream)

    def copy_marked_rows(self, device: int, columns: U64, marks: int, above: int, rows_count: int, stream: int) -> None:
        """Copy row r of every column to row r of its target wherever marks[r] is greater than `above`.

        columns: as in copy_rows. marks: address of uint8 [rows_count] on the device.
        """
        check_table(columns, columns_count=3, name="columns")
        check_mark(above, name="above")
        check_count(rows_count, name="rows_count")
        places = columns.ctypes.data, _NO_CASTS, len(columns)
        self._call(self._library.ac_cuda_copy_marked_rows, device, *places, marks, above, rows_count, stream)

    def fingerprints(self, device: int, columns: U64, rows_count: int, target: int, stream: int) -> None:
        """Write the fingerprints of Core.fingerprints, bit for bit, to the address `target` of uint64 [rows_count].

        columns: uint64 [c, 2] of (address, row bytes).
        """
        row_columns = checked_row_columns(columns, rows_count)
        places = row_columns.ctypes.data, len(columns), rows_count, target
        self._call(self._library.ac_cuda_fingerprint, device, *places, stream)

    def _call(self, function: Callable[..., int], *arguments: object) -> None:
        """Call a function whose last argument is an ac_error and raise what it reports."""
        error = AcError()
        status = function(*arguments, byref(error))
        if status == DEVICE:
            name = self._library.ac_cuda_error_name(error.sys_errno).decode()
            message = error.message.decode("utf-8", "replace")
            raise DeviceFailure(message, name=name, number=error.sys_errno, item=error.item)
        if status != OK:
            raise_error(error)
