"""The C interface of csrc/include/asyncckpt_cuda.h in ctypes: functions, and loading the library.

tests/unit/native/test_cuda_declarations.py reads the header and holds this file against it. The structures are those of
declarations.py.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, c_char_p, c_int32, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from asyncckpt.native.declarations import AcError, UnusableLibrary

CUDA_ABI_VERSION = 1
CUDA_LIBRARY_NAME = "libasyncckpt_cuda.so"

# Beside the statuses of declarations.py.
DEVICE = 6
AS_IS, TO_BFLOAT16 = range(2)

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


def load_functions(path: Path | None) -> ctypes.CDLL:
    """Load the library at `path`, None for that of this package, and check its version.

    Raises UnusableLibrary with the reason. Loading neither needs a driver nor starts one.
    """
    path = _find() if path is None else path
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in CUDA_FUNCTIONS.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise UnusableLibrary(f"cannot load {str(path)!r}: {error}") from error
    version = library.ac_cuda_abi_version()
    if version != CUDA_ABI_VERSION:
        raise UnusableLibrary(f"{str(path)!r} has interface version {version}, expected {CUDA_ABI_VERSION}")
    return library


def _find() -> Path:
    """The library lies in this package where it was built; see declarations.py."""
    folders = [Path(folder) for folder in sys.modules[__name__.rpartition(".")[0]].__path__]
    for folder in folders:
        if (folder / CUDA_LIBRARY_NAME).is_file():
            return folder / CUDA_LIBRARY_NAME
    places = " or ".join(repr(str(folder)) for folder in folders)
    raise UnusableLibrary(f"no {CUDA_LIBRARY_NAME} in {places}: this package was built without a CUDA compiler")
