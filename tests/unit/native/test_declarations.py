"""declarations.py says the same as csrc/include/asyncckpt.h: structures, functions, arguments, constants."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest

from asyncckpt.native import (
    BFLOAT16,
    DIGEST_BYTES,
    FLOAT16,
    FLOAT32,
    LEAF_BYTES,
    PAGE_BYTES,
    Rule,
    declarations,
    library,
)
from tests.unit.native.headers import INCLUDE, check_arguments, functions_of, text_of


class Segment(ctypes.Structure):
    _fields_ = [("source", ctypes.c_void_p), ("target", ctypes.c_void_p), ("bytes", ctypes.c_uint64)]


class Span(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_uint64)]


class ReadItem(ctypes.Structure):
    _fields_ = [
        ("target", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("fd", ctypes.c_int32),
        ("direct", ctypes.c_int32),
    ]


class RowColumn(ctypes.Structure):
    _fields_ = [("source", ctypes.c_void_p), ("target", ctypes.c_void_p), ("row_bytes", ctypes.c_uint64)]


STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "ac_error": declarations.AcError,
    "ac_file": declarations.AcFile,
    "ac_drain_options": declarations.AcDrainOptions,
    "ac_read_options": declarations.AcReadOptions,
    "ac_row_update": declarations.AcRowUpdate,
    # NumPy arrays are sent in place of these: uint64 [n, 3] or [n, 2], and library._READ_ITEM.
    "ac_segment": Segment,
    "ac_span": Span,
    "ac_read_item": ReadItem,
    "ac_row_column": RowColumn,
}
HEADER = INCLUDE / "asyncckpt.h"
VALUES = {
    "void": None,
    "char": ctypes.c_char,
    "float": ctypes.c_float,
    "uint8_t": ctypes.c_uint8,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "void*": ctypes.c_void_p,
}


def allowed(c_type: str) -> list[Any]:
    """The ctypes types that may stand for a C type: any pointer may travel as an address."""
    c_type = re.sub(r"\s*\*", "*", c_type.replace("const", "")).strip()
    if not c_type.endswith("*"):
        return [VALUES[c_type]]
    pointed = c_type[:-1]
    structure = STRUCTURES.get(pointed)
    exact = ctypes.POINTER(structure) if structure else ctypes.POINTER(VALUES[pointed]) if pointed in VALUES else None
    return [ctypes.c_void_p, exact] + ([ctypes.c_char_p] if pointed == "char" else [])


def structures() -> dict[str, list[tuple[str, str]]]:
    found = re.findall(r"typedef struct (ac_\w+) \{(.*?)\}", text_of(HEADER), flags=re.DOTALL)
    return {name: re.findall(r"([\w ]+?[ *]+)(\w+(?:\[\d+\])?);", body.replace("\n", " ")) for name, body in found}


def test_same_functions() -> None:
    assert sorted(name for name, _, _ in functions_of(HEADER)) == sorted(declarations.FUNCTIONS)


@pytest.mark.parametrize(("name", "result", "arguments"), functions_of(HEADER), ids=lambda value: str(value)[:24])
def test_same_arguments(name: str, result: str, arguments: list[str]) -> None:
    check_arguments(declarations.FUNCTIONS[name], result, arguments, allowed)


def test_same_structures() -> None:
    assert sorted(structures()) == sorted(STRUCTURES)
    for name, fields in structures().items():
        declared: Any = STRUCTURES[name]._fields_
        assert len(fields) == len(declared)
        for (c_type, c_name), (declared_name, declared_type) in zip(fields, declared, strict=True):
            plain_name, _, length = c_name.partition("[")
            assert plain_name == declared_name
            expected = [item * int(length[:-1]) for item in allowed(c_type)] if length else allowed(c_type)
            assert declared_type in expected, f"{name}.{plain_name} is declared as {declared_type}"


def test_arrays_have_the_layout_of_their_structures() -> None:
    assert [ctypes.sizeof(structure) for structure in (Segment, RowColumn, Span)] == [24, 24, 16]
    assert library._READ_ITEM.itemsize == ctypes.sizeof(ReadItem)
    assert library._READ_ITEM.fields is not None
    offsets = {name: field[1] for name, field in library._READ_ITEM.fields.items()}
    assert offsets == {"place": ReadItem.target.offset, "fd": ReadItem.fd.offset, "direct": ReadItem.direct.offset}


def test_same_constants() -> None:
    numbers = dict(re.findall(r"#define (AC_\w+) (.+)", text_of(HEADER)))
    assert int(numbers["AC_ABI_VERSION"].strip("u ")) == declarations.ABI_VERSION
    assert int(numbers["AC_PAGE_BYTES"].strip("u ")) == PAGE_BYTES
    assert int(numbers["AC_DIGEST_BYTES"].strip("u ")) == DIGEST_BYTES
    assert re.fullmatch(r"\(4u << 20\)", numbers["AC_LEAF_BYTES"].strip())
    assert LEAF_BYTES == 4 << 20


def test_same_statuses() -> None:
    assert values_of("ac_status") == {
        f"AC_{name}": getattr(declarations, name)
        for name in ["OK", "INVALID", "SYSTEM", "NO_MEMORY", "CANCELLED", "SHORT"]
    }


def test_same_rules() -> None:
    assert values_of("ac_rule") == {f"AC_RULE_{rule.name}": rule.value for rule in Rule}
    assert values_of("ac_float") == {"AC_FLOAT32": FLOAT32, "AC_FLOAT16": FLOAT16, "AC_BFLOAT16": BFLOAT16}
    numbers_max = int(re.findall(r"#define AC_RULE_NUMBERS (\d+)", text_of(HEADER))[0])
    assert numbers_max == library._RULE_NUMBERS == max(rule.numbers_count for rule in Rule)


def values_of(enum: str) -> dict[str, int]:
    [body] = re.findall(rf"typedef enum {enum} \{{(.*?)\}}", text_of(HEADER), flags=re.DOTALL)
    return {name: int(value) for name, value in re.findall(r"(\w+) = (\d+)", body)}
