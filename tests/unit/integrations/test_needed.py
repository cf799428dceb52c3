"""Without its library an integration says which package to install, and asyncckpt imports none of them."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import asyncckpt
from asyncckpt.integrations.needed import needed

PACKAGES = {
    "transformers": "transformers",
    "lightning": "lightning",
    "accelerate": "accelerate",
}


@pytest.mark.parametrize(("module", "package"), PACKAGES.items())
def test_each_integration_names_its_package(module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Missing(package), *sys.meta_path])
    for name in [name for name in sys.modules if name.startswith("asyncckpt.integrations.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(asyncckpt.UnsupportedError, match=f"pip install {package}"):
        importlib.import_module(f"asyncckpt.integrations.{module}")


class _Missing:
    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, *_: object) -> None:
        if name.split(".")[0] == self._package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_what_a_library_lacks_itself_is_not_hidden(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "half_a_library.py").write_text("import what_it_lacks\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="what_it_lacks"):
        needed("half_a_library", "half-a-library")


def test_a_library_that_is_too_old_is_refused_with_its_version() -> None:
    with pytest.raises(
        asyncckpt.UnsupportedError, match=r"needs numpy 99.1 or newer, found '.*pip install 'numpy>=99.1'"
    ):
        needed("numpy", "numpy", at_least="99.1")
    assert needed("numpy", "numpy", at_least="1.9").__name__ == "numpy"  # Numbers are compared: 1.26 is newer.


def test_nothing_of_them_is_imported_with_asyncckpt() -> None:
    program = "import asyncckpt.integrations, sys; asyncckpt.Checkpointer; asyncckpt.load; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert not {"transformers", "lightning", "accelerate", "ray", "torchtitan"} & set(done.stdout.split())
