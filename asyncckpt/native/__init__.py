"""The only interface to the compiled core.

`core` is chosen once, at import, by the environment variable ASYNCCKPT_NATIVE:

    unset   the compiled core if it loads, else the portable twin, with a warning
    1       the compiled core, or ImportError with the reason
    0       the portable twin
"""

from __future__ import annotations

import os
import sys

from asyncckpt.errors import warn
from asyncckpt.model.block import DIGEST_BYTES, LEAF_BYTES
from asyncckpt.native.contract import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    I64,
    PAGE_BYTES,
    U8,
    U64,
    CancelledDrain,
    Core,
    CoreIOError,
    Digester,
    DrainOptions,
    FileImage,
    FloatRows,
    IdMap,
    Memory,
    Progress,
    Reads,
    RowUpdate,
    ShortFile,
    paged,
)
from asyncckpt.native.declarations import UnusableLibrary
from asyncckpt.native.library import NativeCore, row_begins
from asyncckpt.native.row_rules import Rule, new_values
from asyncckpt.native.twin import TwinCore, memory_at

ENVIRONMENT_VARIABLE = "ASYNCCKPT_NATIVE"
_HINT = (
    "install a wheel of it, or a C++20 compiler and then asyncckpt again"
    if sys.platform == "linux"
    else f"the core is for Linux; on {sys.platform} asyncckpt is experimental, tested only by simulation"
)


def choose_core(wish: str | None) -> Core:
    """Return the implementation for a value of ASYNCCKPT_NATIVE."""
    if wish not in (None, "", "0", "1"):
        raise ImportError(f"{ENVIRONMENT_VARIABLE} must be 0, 1 or unset, found {wish!r}")
    if wish == "0":
        return TwinCore()
    try:
        return NativeCore()
    except UnusableLibrary as error:
        if wish == "1":
            raise ImportError(f"{ENVIRONMENT_VARIABLE}=1 but the compiled core cannot be used: {error}") from error
        warn(
            "asyncckpt runs its portable twin, which is several times slower than its compiled core: "
            f"{error}; {_HINT}, or set {ENVIRONMENT_VARIABLE}=0 to have the twin without this line",
            RuntimeWarning,
        )
        return TwinCore()


core: Core = choose_core(os.environ.get(ENVIRONMENT_VARIABLE))
implementation: str = core.implementation

__all__ = [
    "BFLOAT16",
    "DIGEST_BYTES",
    "FLOAT16",
    "FLOAT32",
    "I64",
    "LEAF_BYTES",
    "PAGE_BYTES",
    "U8",
    "U64",
    "CancelledDrain",
    "Core",
    "CoreIOError",
    "Digester",
    "DrainOptions",
    "FileImage",
    "FloatRows",
    "IdMap",
    "Memory",
    "NativeCore",
    "Progress",
    "Reads",
    "RowUpdate",
    "Rule",
    "ShortFile",
    "TwinCore",
    "UnusableLibrary",
    "core",
    "implementation",
    "memory_at",
    "new_values",
    "paged",
    "row_begins",
]
