"""Which implementation ASYNCCKPT_NATIVE gives, with a library and without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asyncckpt import native as door
from asyncckpt.native import Core, UnusableLibrary, choose_core, declarations


def test_twin_on_request() -> None:
    assert choose_core("0").implementation == "twin"
    assert choose_core("0").cores_count >= 1


@pytest.mark.parametrize("wish", [None, "", "1"])
def test_compiled_core_where_it_is_built(native: Core, wish: str | None) -> None:
    core = choose_core(wish)
    assert core.implementation == "native"
    assert core.cpu_variant in ("avx512", "avx2", "portable")
    assert core.cores_count >= 1


def test_unknown_wish() -> None:
    with pytest.raises(ImportError, match="ASYNCCKPT_NATIVE must be 0, 1 or unset, found 'yes'"):
        choose_core("yes")


def test_without_a_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(door, "__path__", [str(tmp_path)])
    with pytest.warns(
        RuntimeWarning, match="portable twin, which is several times slower .* or set ASYNCCKPT_NATIVE=0"
    ):
        assert choose_core(None).implementation == "twin"
    with pytest.raises(ImportError, match=r"compiled core cannot be used: no libasyncckpt\.so"):
        choose_core("1")


def test_with_something_that_is_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / declarations.LIBRARY_NAME).write_bytes(b"no library")
    monkeypatch.setattr(door, "__path__", [str(tmp_path)])
    with pytest.raises(UnusableLibrary, match="cannot load"):
        declarations.load_library()


def test_with_the_library_of_another_version(native: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declarations, "ABI_VERSION", declarations.ABI_VERSION + 1)
    with pytest.raises(UnusableLibrary, match="has interface version"):
        declarations.load_library()


def test_the_line_of_the_program_that_gets_the_twin_is_told_once(tmp_path: Path) -> None:
    package = Path(door.__file__).parents[1]
    shutil.copytree(package, tmp_path / "asyncckpt", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    program = tmp_path / "train.py"
    program.write_text(
        "import sys\n"
        "sys.meta_path[:] = [finder for finder in sys.meta_path if 'editable' not in type(finder).__module__]\n"
        "import asyncckpt\nasyncckpt.save('ckpt', {'a': 1})\nprint(asyncckpt.load('ckpt'))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "ASYNCCKPT_NATIVE"}
    done = subprocess.run(
        [sys.executable, program.name], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "{'a': 1}\n", done.stderr
    assert done.stderr.count("RuntimeWarning: asyncckpt runs its portable twin") == 1
    assert "train.py:4: RuntimeWarning" in done.stderr
