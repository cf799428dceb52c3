"""Which implementation ASYNCCKPT_NATIVE gives, with a library and without."""

from __future__ import annotations

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
