"""Public means listed in `asyncckpt/__init__.py`, and documented."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import asyncckpt

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_public_name_is_documented() -> None:
    names = [*DOCS.glob("*.md"), DOCS / "decisions/0005-public-names.md"]
    pages = "".join(page.read_text(encoding="utf-8") for page in names)
    assert [name for name in asyncckpt.__all__ if f"`{name}`" not in pages and f"asyncckpt.{name}" not in pages] == []


def test_every_public_name_is_there() -> None:
    assert [name for name in asyncckpt.__all__ if not hasattr(asyncckpt, name)] == []


def test_few_names_are_public() -> None:
    assert len(asyncckpt.__all__) <= 46


def test_the_savers_parameters() -> None:
    """RecIS' seven come first, in its order, and are positional; everything else is keyword-only."""
    parameters = list(inspect.signature(asyncckpt.Saver).parameters.values())
    assert len(parameters) <= 17
    positional = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert positional == ["shard_index", "shard_num", "parallel", "path", "hashtables", "tensors", "filter_func"]
    assert [parameter.name for parameter in parameters[:7]] == positional
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters[7:])


@pytest.mark.parametrize("kind", [asyncckpt.Checkpointer, asyncckpt.Saver, asyncckpt.Loader, asyncckpt.PeriodicSaver])
def test_every_public_method_is_on_a_page(kind: type) -> None:
    """What is for other rooms alone has an underscore."""
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    names = [name for name in dir(kind) if not name.startswith("_")]
    assert [name for name in names if re.search(rf"\b{name}\b", pages) is None] == []


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


def test_names_that_are_imported_late_are_those_that_type_checkers_see() -> None:
    """`asyncckpt/__init__.py` says three times what is public: to type checkers, to `import *`, and to itself."""
    source = ast.parse(Path(asyncckpt.__file__).read_text(encoding="utf-8"))
    [block] = [node for node in source.body if isinstance(node, ast.If)]
    seen = {
        alias.name: str(node.module) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert sorted(seen) == sorted(asyncckpt.__all__)
    for name, module in seen.items():
        if module != "asyncckpt":
            assert getattr(asyncckpt, name) is getattr(import_module(module), name)
            assert asyncckpt._MODULES.get(name, "errors") == module.removeprefix("asyncckpt.")
    assert set(asyncckpt.__all__) <= set(dir(asyncckpt))


def test_what_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Savr'"):
        asyncckpt.Savr  # noqa: B018
    assert not hasattr(asyncckpt, "_private")


def imports_of(source: str) -> list[str]:
    """What a program imports of this package: modules, and names as `module.name`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in found if name.split(".")[0] == "asyncckpt"]


def is_public(name: str, page: str) -> bool:
    """Whether a page of public names has it: as a module, or as one of the names of one."""
    module, _, last = name.rpartition(".")
    if f"`{name}`" in page or name == "asyncckpt":
        return True
    if module == "asyncckpt":
        return last in asyncckpt.__all__
    if module.startswith("asyncckpt.integrations."):  # Its library may not be installed.
        source = DOCS.parent / (module.replace(".", "/") + ".py")
        listed_there = re.search(r"^__all__ = (\[.*?\])$", source.read_text("utf-8"), re.M | re.S)
        return listed_there is not None and f'"{last}"' in listed_there.group(1)
    listed = getattr(import_module(module), "__all__", None)
    return f"`{module}`" in page and (listed is None or last in listed or f"`{last}`" in page)


def test_pages_and_examples_import_public_names_alone() -> None:
    decision = (DOCS / "decisions/0005-public-names.md").read_text(encoding="utf-8")
    pages = [*DOCS.glob("*.md"), DOCS.parent / "README.md"]
    blocks = [
        text for path in pages for text in re.findall(r"^```python\n(.*?)^```$", path.read_text("utf-8"), re.M | re.S)
    ]
    programs = [path.read_text("utf-8") for path in (DOCS.parent / "examples").glob("*.py")]
    imported = {name for source in (*blocks, *programs) for name in imports_of(source)}
    assert len(imported) > 15
    assert sorted(name for name in imported if not is_public(name, decision)) == []


def test_the_check_sees_an_internal_name() -> None:
    decision = (DOCS / "decisions/0005-public-names.md").read_text(encoding="utf-8")
    names = [
        "asyncckpt.storage.directory.Directory",
        "asyncckpt.engine",
        "asyncckpt.native.core",
        "asyncckpt.dcp.writer.StorageWriter",
    ]
    assert [name for name in names if is_public(name, decision)] == []
