"""The C interface of csrc/include/asyncckpt_cuda.h in ctypes: functions, and loading the library.

tests/unit/native/test_cuda_declarations.py reads the header and compares this file with it. declarations.py has the
structures.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int32, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from asyncckpt.native.declarations import AcError, find_library, load

CUDA_ABI_VERSION = 1
CUDA_LIBRARY_NAME = "libasyncckpt_cuda.so"

# In addition to the statuses of declarations.py.
DEVICE = 6

_ERROR = POINTER(AcError)

# Name -> (result, arguments).
CUDA_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ac_cuda_abi_version": (c_uint32, []),
    "ac_cuda_error_name": (c_char_p, [c_int32]),
    "ac_cuda_devices_count": (c_int32, [POINTER(c_int32), _ERROR]),
    "ac_cuda_usable": (c_int32, [c_int32, _ERROR]),
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


def load_cuda_functions(path: Path | None) -> ctypes.CDLL:
    """Load the library at `path`, None for the one of this package, and check its version.

    Raises UnusableLibrary with the reason. Loading needs no driver and starts none.
    """
    if path is None:
        path = find_library(CUDA_LIBRARY_NAME, hint=": this package was built without a CUDA compiler")
    return load(path, CUDA_FUNCTIONS, version_function="ac_cuda_abi_version", version=CUDA_ABI_VERSION)
