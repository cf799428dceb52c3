"""Nothing reads memory of torch or of the interpreter past their interfaces: such reads end with their next version."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATTERNS = {
    "memory at an address of an object": r"\bid\([^()]*\)\s*[+]|[+]\s*id\(",
    "memory that is taken for a structure": r"\.from_address\(",
    "torch's pointers": r"\b_cdata\b|aoti_torch|\bTHPVariable\b|TensorImpl",
    "the interpreter's objects": r"\bPy_?(Object|IncRef|DecRef|INCREF|DECREF|Dict_|List_|Tuple_)|__basicsize__",
    "the interpreter's own functions": r"\bpythonapi\b|\bpy_object\b|RTLD_NOLOAD",
}
# The portable twin of the core reads and writes the memory that its callers name, as the core does: that of arrays.
OF_ARRAYS = {"asyncckpt/native/twin.py", "asyncckpt/native/twin_update.py"}


def sources() -> list[Path]:
    found = [*(ROOT / "asyncckpt").rglob("*.py")]
    return found + [path for folder in ("src", "include", "cuda") for path in (ROOT / "csrc" / folder).rglob("*.*")]


def matches(text: str) -> list[str]:
    return [kind for kind, pattern in PATTERNS.items() if re.search(pattern, text)]


def test_no_source_reads_private_memory() -> None:
    paths = sources()
    assert len(paths) > 300
    found = {str(path.relative_to(ROOT)): matches(path.read_text()) for path in paths}
    assert {path for path, kinds in found.items() if kinds} == OF_ARRAYS
    assert all(found[path] == ["memory that is taken for a structure"] for path in OF_ARRAYS)


@pytest.mark.parametrize(
    "line",
    [
        "address = id(tensor) + offset",
        "(ctypes.c_uint64 * 8).from_address(item)",
        "item._cdata",
        'getattr(library, "aoti_torch_get_dim")',
        "ctypes.pythonapi.PyDict_Next",
        "const PyObject* item;",
    ],
)
def test_such_a_read_would_be_found(line: str) -> None:
    assert matches(line)
