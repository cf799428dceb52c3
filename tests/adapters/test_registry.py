"""Adapters are found by type and by qualified name, along the bases of a module."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from asyncckpt.adapters import FixedTable, register_adapter, tables_of
from asyncckpt.errors import UsageError
from asyncckpt.model.table import Table
from asyncckpt.modules.registry import adapter_of

pytestmark = pytest.mark.usefixtures("own_registry")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.zeros(3, 2)


class Derived(Base):
    pass


def factory(mark: str) -> Any:
    def make(module: Base, name: str) -> dict[str, Table]:
        return {f"{name}{mark}": FixedTable(mark, lambda: {"embedding": module.rows})}

    return make


def names(module: nn.Module) -> list[str]:
    return list(tables_of(module))


def test_a_type_and_its_subclasses_are_found() -> None:
    register_adapter(Base, factory("base"))
    assert names(Base()) == ["base"]
    assert names(Derived()) == ["base"]
    assert names(nn.Linear(1, 1)) == []


def test_a_qualified_name_is_found_without_the_type() -> None:
    register_adapter(f"{__name__}.Base", factory("base"))
    assert names(Derived()) == ["base"]


def test_the_nearest_class_wins() -> None:
    register_adapter(Derived, factory("derived"))
    register_adapter(Base, factory("base"))
    assert names(Derived()) == ["derived"]
    assert names(Base()) == ["base"]


@pytest.mark.parametrize("kinds", [(Base, Base), (f"{__name__}.Base", Base), (Base, f"{__name__}.Base")], ids=str)
def test_later_registrations_win(kinds: tuple[Any, Any]) -> None:
    register_adapter(kinds[0], factory("first"))
    register_adapter(kinds[1], factory("second"))
    assert names(Base()) == ["second"]
    assert names(Derived()) == ["second"]


def test_a_registration_of_ours_can_be_replaced() -> None:
    register_adapter(nn.Embedding, lambda module, name: {})
    assert names(nn.Embedding(2, 2)) == []


@pytest.mark.parametrize("kind", ["Embedding", "", "a b.c", "torch..nn", "torch.nn.", 3, None, nn.Embedding(1, 1)])
def test_a_wrong_kind_is_refused(kind: Any) -> None:
    with pytest.raises(UsageError, match="kind of an adapter must be"):
        register_adapter(kind, factory("x"))


def test_what_is_not_callable_is_refused() -> None:
    with pytest.raises(UsageError, match=r"factory of the adapter for .*Base is not callable, found a dict"):
        register_adapter(Base, {})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"rest of the adapter for .*Base is not callable"):
        register_adapter(Base, factory("x"), rest=3)  # type: ignore[arg-type]
    assert adapter_of(Base()) is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "returned no mapping for module 'inner', found None"),
        ([("t", 1)], "returned no mapping"),
        ({"t": torch.zeros(2)}, r"returned something else than tables for module 'inner', found \('t', 'Tensor'\)"),
        ({3: None}, "returned something else than tables"),
    ],
)
def test_a_factory_that_returns_nonsense_is_named(answer: Any, message: str) -> None:
    register_adapter(Base, lambda module, name: answer)
    with pytest.raises(UsageError, match=message):
        tables_of(nn.ModuleDict({"inner": Base()}))


def test_adapters_of_this_package_are_imported_when_a_library_is_met_and_do_not_replace_a_users() -> None:
    code = """
import sys, torch
from asyncckpt.modules.registry import adapter_of, register_adapter
own = "asyncckpt.adapters.torchrec"
assert adapter_of(torch.nn.Linear(1, 1)) is None and own not in sys.modules
kind = type("EmbeddingCollection", (torch.nn.Module,), {"__module__": "torchrec.modules.embedding_modules"})
assert adapter_of(kind()).factory.__self__.__class__.__name__ == "PlainCollection" and own in sys.modules
"""
    mine = """
import torch
from asyncckpt.modules.registry import adapter_of, register_adapter
name = "torchrec.modules.embedding_modules"
register_adapter(f"{name}.EmbeddingCollection", print)
kind = type("EmbeddingCollection", (torch.nn.Module,), {"__module__": name})
assert adapter_of(kind()).factory is print
"""
    # Registered by a user where warnings are errors; classes of two libraries that two threads meet first.
    strict = """
import threading, warnings, torch
from asyncckpt.modules.registry import adapter_of, register_adapter
warnings.simplefilter("error")
register_adapter("merlin_kv.Table", print)
assert adapter_of(type("Loss", (torch.nn.Module,), {"__module__": "dynamicemb.losses"})()) is None
assert adapter_of(type("Odd", (torch.nn.Module,), {"__module__": None})()) is None
"""
    threads = """
import threading, torch
from asyncckpt.modules.registry import adapter_of
names = ["torchrec.x", "fbgemm_gpu.x"]
kinds = [type("Some", (torch.nn.Module,), {"__module__": name})() for name in names]
begin, found = threading.Barrier(2), []
def meet(module):
    begin.wait()
    found.append(adapter_of(module))
others = [threading.Thread(target=meet, args=[module]) for module in kinds]
for each in others: each.start()
for each in others: each.join()
assert found == [None] * 2, found
"""
    for program in (code, mine, strict, threads):
        subprocess.run([sys.executable, "-c", program], timeout=120, check=True)
