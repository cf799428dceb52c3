"""The C interface of csrc/include/asyncckpt.h in ctypes: structures, functions, and loading the library.

tests/unit/native/test_declarations.py reads the header and compares this file with it. Arrays are passed as addresses
(c_void_p); ctypes releases the GIL around every call.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, c_char, c_char_p, c_int32, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

ABI_VERSION = 11
LIBRARY_NAME = "libasyncckpt.so"

OK, INVALID, SYSTEM, NO_MEMORY, CANCELLED, SHORT = range(6)


class UnusableLibrary(Exception):
    """The compiled core is missing, does not load, or belongs to another version of this package."""


class AcError(ctypes.Structure):
    _fields_ = [("status", c_int32), ("sys_errno", c_int32), ("item", c_uint64), ("message", c_char * 240)]


class AcFile(ctypes.Structure):
    _fields_ = [("extents", c_void_p), ("extents_count", c_uint64), ("fd", c_int32), ("direct", c_int32)]


class AcDrainOptions(ctypes.Structure):
    _fields_ = [
        ("block_bytes", c_uint64),
        ("writers", c_uint32),
        ("digest_threads", c_uint32),
        ("background", c_uint32),
        ("sync", c_uint32),
    ]


class AcReadOptions(ctypes.Structure):
    _fields_ = [("block_bytes", c_uint64), ("threads", c_uint32)]


class AcRowUpdate(ctypes.Structure):
    _fields_ = [
        ("gradient", c_void_p),
        ("weight", c_void_p),
        ("first", c_void_p),
        ("second", c_void_p),
        ("marks", c_void_p),
        ("numbers", c_void_p),
        ("rows_count", c_uint64),
        ("dim", c_uint64),
        ("rule", c_uint32),
        ("gradient_float", c_uint32),
        ("weight_float", c_uint32),
        ("first_float", c_uint32),
        ("second_float", c_uint32),
        ("rowwise", c_uint32),
        ("mark", c_uint32),
    ]


_ERROR = POINTER(AcError)

# Name -> (result, arguments). None is void.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ac_abi_version": (c_uint32, []),
    "ac_cpu_variant": (c_char_p, []),
    "ac_cores_count": (c_uint32, []),
    "ac_copy": (c_int32, [c_void_p, c_uint64, c_uint32, _ERROR]),
    "ac_memory_map": (c_int32, [c_uint64, POINTER(c_void_p), _ERROR]),
    "ac_memory_resize": (c_int32, [c_void_p, c_uint64, c_uint64, POINTER(c_void_p), _ERROR]),
    "ac_memory_touch": (c_int32, [c_void_p, c_uint64, c_uint64, c_uint32, _ERROR]),
    "ac_memory_unmap": (c_int32, [c_void_p, c_uint64, _ERROR]),
    "ac_memory_advise_huge": (None, [c_void_p, c_uint64]),
    "ac_digest": (c_int32, [c_void_p, c_uint64, c_void_p, c_void_p, c_uint32, _ERROR]),
    "ac_digester_new": (c_void_p, []),
    "ac_digester_update": (c_int32, [c_void_p, c_void_p, c_uint64, _ERROR]),
    "ac_digester_end": (None, [c_void_p, c_void_p, c_void_p]),
    "ac_digester_free": (None, [c_void_p]),
    "ac_drain": (
        c_int32,
        [
            *(c_void_p, c_uint64, c_void_p, c_uint64, c_void_p, c_void_p),
            *(POINTER(AcDrainOptions), c_void_p, c_void_p, _ERROR),
        ],
    ),
    "ac_write": (c_int32, [c_int32, c_void_p, c_uint64, c_uint64, c_int32, _ERROR]),
    "ac_read": (c_int32, [c_void_p, c_uint64, c_void_p, POINTER(AcReadOptions), c_void_p, c_void_p, _ERROR]),
    "ac_copy_rows": (c_int32, [c_void_p, c_uint64, c_void_p, c_void_p, c_uint64, c_uint32, _ERROR]),
    "ac_fingerprint": (c_int32, [c_void_p, c_uint64, c_uint64, c_void_p, c_uint32, _ERROR]),
    "ac_mark": (c_int32, [c_void_p, c_uint64, c_void_p, c_uint64, c_uint8, _ERROR]),
    "ac_marked": (c_int32, [c_void_p, c_uint64, c_uint8, c_void_p, c_uint64, POINTER(c_uint64), c_uint32, _ERROR]),
    "ac_update_rows": (c_int32, [POINTER(AcRowUpdate), c_void_p, c_uint64, c_uint32, _ERROR]),
    "ac_idmap_new": (c_void_p, [c_uint64]),
    "ac_idmap_free": (None, [c_void_p]),
    "ac_idmap_size": (c_uint64, [c_void_p]),
    "ac_idmap_rows_end": (c_uint64, [c_void_p]),
    "ac_idmap_bytes": (c_uint64, [c_void_p]),
    "ac_idmap_ids": (c_void_p, [c_void_p]),
    "ac_idmap_reserve": (c_int32, [c_void_p, c_uint64, _ERROR]),
    "ac_idmap_find": (c_int32, [c_void_p, c_void_p, c_uint64, c_void_p, _ERROR]),
    "ac_idmap_insert": (
        c_int32,
        [
            *(c_void_p, c_void_p, c_uint64, c_void_p, c_void_p, POINTER(c_uint64)),
            *(c_void_p, c_uint64, c_uint8, _ERROR),
        ],
    ),
    "ac_idmap_remove": (c_int32, [c_void_p, c_void_p, c_uint64, c_void_p, _ERROR]),
    "ac_idmap_runs": (c_int32, [c_void_p, c_void_p, c_uint64, POINTER(c_uint64), _ERROR]),
    "ac_idmap_clear": (None, [c_void_p]),
}


def load_library() -> ctypes.CDLL:
    """Load the compiled core and check its version; raise UnusableLibrary with the reason otherwise."""
    return load(find_library(LIBRARY_NAME), FUNCTIONS, version_function="ac_abi_version", version=ABI_VERSION)


def load(
    path: Path, functions: dict[str, tuple[Any, list[Any]]], *, version_function: str, version: int
) -> ctypes.CDLL:
    """Load the library at `path`, declare its functions and check its version; raises UnusableLibrary."""
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in functions.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise UnusableLibrary(f"cannot load {str(path)!r}: {error}") from error
    found = getattr(library, version_function)()
    if found != version:
        raise UnusableLibrary(f"{str(path)!r} has interface version {found}, expected {version}")
    return library


def find_library(name: str, *, hint: str = "") -> Path:
    """Return the path of a library in this package, which an editable install spreads over source and build folder."""
    folders = [Path(folder) for folder in sys.modules[__name__.rpartition(".")[0]].__path__]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise UnusableLibrary(f"no {name} in {' or '.join(repr(str(folder)) for folder in folders)}{hint}")
