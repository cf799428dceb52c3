"""cuda.py says the same as csrc/include/asyncckpt_cuda.h."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest

from asyncckpt.native import cuda, declarations

HEADER = Path(__file__).parents[3] / "csrc" / "include" / "asyncckpt_cuda.h"
VALUES = {
    "int32_t": ctypes.c_int32,
    "uint8_t": ctypes.c_uint8,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
}


def header_text() -> str:
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)


def functions() -> list[tuple[str, str, list[str]]]:
    found = re.findall(r"AC_API\s+([\w\s]+?[\s*]+)(ac_\w+)\(([^)]*)\)", header_text())
    assert len(found) == header_text().count("AC_API ")
    return [
        (name, result.strip(), [] if arguments.strip() == "void" else arguments.split(","))
        for result, name, arguments in found
    ]


def allowed(c_type: str) -> list[Any]:
    """The ctypes types that may stand for a C type: most pointers travel as addresses."""
    c_type = re.sub(r"\s*\*", "*", c_type.replace("const", "")).strip()
    if not c_type.endswith("*"):
        return [VALUES[c_type]]
    if c_type == "ac_error*":
        return [ctypes.POINTER(declarations.AcError)]
    exact = {"int32_t*": [ctypes.POINTER(ctypes.c_int32)], "char*": [ctypes.c_char_p]}
    return exact.get(c_type, [ctypes.c_void_p])


def test_same_functions() -> None:
    assert sorted(name for name, _, _ in functions()) == sorted(cuda.CUDA_FUNCTIONS)


@pytest.mark.parametrize(("name", "result", "arguments"), functions(), ids=lambda value: str(value)[:24])
def test_same_arguments(name: str, result: str, arguments: list[str]) -> None:
    declared_result, declared_arguments = cuda.CUDA_FUNCTIONS[name]
    assert declared_result in allowed(result)
    assert len(declared_arguments) == len(arguments)
    for declared, argument in zip(declared_arguments, arguments, strict=True):
        c_type = re.sub(r"\w+$", "", argument.strip())
        assert declared in allowed(c_type), f"{name}: {argument.strip()!r} is declared as {declared}"


def test_same_constants() -> None:
    numbers = {name: int(value) for name, value in re.findall(r"(AC_\w+)(?: =)? (\d+)u?", header_text())}
    assert numbers["AC_CUDA_ABI_VERSION"] == cuda.CUDA_ABI_VERSION
    assert numbers["AC_DEVICE"] == cuda.DEVICE


def test_the_status_is_none_of_the_core() -> None:
    assert max(declarations.OK, declarations.SHORT) < cuda.DEVICE
