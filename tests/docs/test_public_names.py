"""Public means listed in `asyncckpt/__init__.py`, and documented."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import asyncckpt

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_public_name_is_documented() -> None:
    names = ("guide.md", "decisions/0005-public-names.md")
    pages = "".join((DOCS / name).read_text(encoding="utf-8") for name in names)
    assert [name for name in asyncckpt.__all__ if f"`{name}`" not in pages and f"asyncckpt.{name}" not in pages] == []


def test_every_public_name_is_there() -> None:
    assert [name for name in asyncckpt.__all__ if not hasattr(asyncckpt, name)] == []


def test_few_names_are_public() -> None:
    assert len(asyncckpt.__all__) <= 50


def test_the_savers_parameters() -> None:
    """RecIS' seven come first, in its order, and are positional; everything else is keyword-only."""
    parameters = list(inspect.signature(asyncckpt.Saver).parameters.values())
    assert len(parameters) <= 16
    positional = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert positional == ["shard_index", "shard_num", "parallel", "path", "hashtables", "tensors", "filter_func"]
    assert [parameter.name for parameter in parameters[:7]] == positional
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters[7:])


def test_a_saver_needs_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder in which a program happens to run is no place to save to unasked."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(asyncckpt.UsageError, match="path is missing"):
        asyncckpt.Saver(tensors={})
    assert list(tmp_path.iterdir()) == []


def test_public_modules_have_the_names_of_the_decision() -> None:
    page = (DOCS / "decisions/0005-public-names.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:`(asyncckpt\.\w+)` )?\| (`.*?`) \|", page, re.MULTILINE)
    module, missing, names_count = "", [], 0
    for name, listed in rows:
        module = name or module
        names = re.findall(r"`(\w+)`", listed)
        names_count += len(names)
        missing += [f"{module}.{item}" for item in names if not hasattr(import_module(module), item)]
    assert missing == []
    assert len({name for name, _ in rows if name}) >= 9
    assert names_count > 30


def test_the_table_protocol_is_documented() -> None:
    page = (DOCS / "decisions/0005-public-names.md").read_text(encoding="utf-8")
    assert [name for name in asyncckpt.table.__all__ if f"`{name}`" not in page] == []
