"""What pip and package indexes show of the package, asked of its build."""

from __future__ import annotations

import importlib
import shutil
import tarfile
from email.message import Message
from email.parser import HeaderParser
from importlib.util import find_spec
from pathlib import Path

import pytest

from asyncckpt.version import __version__

REPOSITORY = Path(__file__).resolve().parents[2]
NEEDED = ("pyproject.toml", "README.md", "LICENSE", "csrc/third_party/LICENSE.xxhash", "asyncckpt/version.py")

pytestmark = pytest.mark.skipif(
    find_spec("scikit_build_core") is None, reason="this environment lacks scikit_build_core"
)


@pytest.fixture
def metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Message:
    """Of an sdist of the few sources that it depends on: all of them take seconds."""
    for name in NEEDED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    name = importlib.import_module("scikit_build_core.build").build_sdist(str(tmp_path / "dist"))
    with tarfile.open(tmp_path / "dist" / name) as sdist:
        file = sdist.extractfile(f"{name.removesuffix('.tar.gz')}/PKG-INFO")
        assert file is not None
        return HeaderParser().parsestr(file.read().decode())


def test_the_readme_is_its_description(metadata: Message) -> None:
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert str(metadata.get_payload()).strip() == (REPOSITORY / "README.md").read_text(encoding="utf-8").strip()


def test_its_version_and_licenses_are_those_of_the_sources(metadata: Message) -> None:
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"]
    assert set(metadata.get_all("License-File") or ()) == {name for name in NEEDED if "LICENSE" in name}
