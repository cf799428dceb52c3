"""Public means listed in `asyncckpt/__init__.py`, and documented."""

from __future__ import annotations

from pathlib import Path

import asyncckpt

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_public_name_is_documented() -> None:
    names = ("guide.md", "decisions/0005-public-names.md")
    pages = "".join((DOCS / name).read_text(encoding="utf-8") for name in names)
    assert [name for name in asyncckpt.__all__ if f"`{name}`" not in pages and f"asyncckpt.{name}" not in pages] == []


def test_every_public_name_is_there() -> None:
    assert [name for name in asyncckpt.__all__ if not hasattr(asyncckpt, name)] == []
