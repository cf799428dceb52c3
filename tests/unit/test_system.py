"""What the system is asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncckpt import system

pytestmark = pytest.mark.any_core


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="this system does not tell")
def test_a_file_is_cached_until_its_pages_are_forgotten(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(1 << 20))
    with (tmp_path / "file").open("rb") as file:
        if not system.is_cached(file.fileno(), 1 << 20):
            pytest.skip("this file system does not tell")
        os.fsync(file.fileno())
        system.forget_pages(file.fileno())
        assert not system.is_cached(file.fileno(), 1 << 20)


def test_where_it_cannot_be_told_a_file_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"content")
    with (tmp_path / "file").open("rb") as file:
        assert not system.is_cached(file.fileno(), 0)
        monkeypatch.delattr(os, "RWF_NOWAIT", raising=False)
        assert not system.is_cached(file.fileno(), 7)
