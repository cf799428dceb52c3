"""A Saver or a Loader refuses to leave out tables of its modules, and names them."""

from __future__ import annotations

import asyncio
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import asyncckpt
from asyncckpt import embcache
from asyncckpt.adapters import dense_state_of, tables_of
from asyncckpt.tables import left_out
from asyncckpt.tables.left_out import tables_left_out
from asyncckpt.trainer_state import TrainerState
from tests.worlds.saves import save_one


class ModelOfTables(torch.nn.Module):
    """Holds tables in the ways people do: in a module, as an attribute, in a list and in a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.users = asyncckpt.nn.HashEmbedding(2, name="user")
        self.plain = asyncckpt.HashTable("plain", 2)
        self.listed = [asyncckpt.HashTable("first", 2)]
        self.named = {"b": asyncckpt.MultiLevelTable("second", 2, cache_rows=4, admit_after=2)}
        self.dense = torch.nn.Linear(2, 1)
        self.itself: Any = [self]

    def by_hand(self) -> dict[str, Any]:
        return {"user": self.users.table, "plain": self.plain, "first": self.listed[0], "second": self.named["b"]}


def test_a_module_among_the_tensors_needs_its_tables(tmp_path: Path) -> None:
    model = ModelOfTables()
    for state in ({"model": model}, {"state": {"models": [model]}}):
        with pytest.raises(asyncckpt.UsageError, match="tables of a module would not be saved") as caught:
            asyncckpt.Saver(path=tmp_path, tensors=state)
        for path, name in (
            ("users.table", "user"),
            ("plain", "plain"),
            ("listed.0", "first"),
            ("named.b", "second"),
        ):
            assert f"{path} (table {name!r})" in str(caught.value)
    tables = model.by_hand()
    del tables["plain"]
    with pytest.raises(asyncckpt.UsageError, match=r"not be saved, found model\.plain \(table 'plain'\)"):
        asyncckpt.Saver(path=tmp_path, hashtables=tables, tensors={"model": model})
    save_one(tmp_path, hashtables=model.by_hand(), tensors={"model": model})


def test_what_asks_for_dense_state_gets_it(tmp_path: Path) -> None:
    model = ModelOfTables()
    save_one(tmp_path, tensors={"model": dense_state_of(model)})
    state = model.state_dict()
    within: dict[str, Any] = {
        "state": state,
        "app.state": {"app": {"state": state}},
        "all.1.state": {"all": [1, {"state": state}]},
    }
    for at, tensors in within.items():
        with pytest.raises(asyncckpt.UsageError, match=rf"not be saved, found {at}\.users \(table 'user'\)"):
            asyncckpt.Saver(path=tmp_path, tensors={"state": tensors} if tensors is state else tensors)


def test_a_state_dict_that_was_loaded_still_says_its_tables(tmp_path: Path) -> None:
    model = ModelOfTables()
    model._version = 7  # type: ignore[assignment]
    save_one(tmp_path, hashtables=model.by_hand(), tensors={"model": model})
    target = ModelOfTables()
    state: Any = target.state_dict()
    asyncckpt.Loader(tmp_path, hashtables=target.by_hand(), tensors={"model": state}).load()
    assert state._metadata[""] == {"version": 7}
    with pytest.raises(asyncckpt.UsageError, match=r"not be saved, found .*users \(table 'user'\)"):
        asyncckpt.Saver(path=tmp_path, tensors={"state": state})


def test_the_tables_of_a_module_are_all_of_them() -> None:
    model = ModelOfTables()
    with pytest.raises(asyncckpt.UsageError, match=r"plain \(table 'plain'\)"):
        tables_of(model)
    del model.plain, model.listed, model.named
    assert list(tables_of(model)) == ["users"]


def test_a_collection_leaves_no_table_beside_it(tmp_path: Path) -> None:
    config = embcache.EmbCacheTableConfig("item", 2, ["f"], cache_rows=4, admit_after=2)
    model = torch.nn.ModuleDict({"ebc": embcache.EmbCacheEmbeddingBagCollection([config])})
    embcache.Saver(rank=0, world_size=1).save(model, str(tmp_path / "one"))
    model["users"] = asyncckpt.nn.HashEmbedding(2, name="user")
    with pytest.raises(asyncckpt.UsageError, match=r"users\.table \(table 'user'\)"):
        embcache.Saver(rank=0, world_size=1).save(model, str(tmp_path / "two"))


def test_many_tables_are_counted(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.tables = [asyncckpt.HashTable(f"t{number}", 1) for number in range(11)]  # type: ignore[assignment]
    with pytest.raises(asyncckpt.UsageError, match=r"model\.tables\.7 \(table 't7'\), 3 more"):
        asyncckpt.Saver(path=tmp_path, tensors={"model": model})


class Holder(torch.nn.Module):
    """Has one attribute of any kind, and something dense."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(2, 1)
        self.held = held


def table_named(name: str = "hidden") -> asyncckpt.HashTable:
    return asyncckpt.HashTable(name, 2)


def itself_and(value: Any) -> list[Any]:
    found: list[Any] = [value]
    found.append(found)
    return found


PLACES: dict[str, Callable[[asyncckpt.HashTable], Any]] = {
    "held": lambda table: table,
    "held.table": lambda table: SimpleNamespace(table=table),
    "held.a.b": lambda table: {"a": {"b": table}},
    "held.0.0": lambda table: [[table]],
    "held.1.2.x": lambda table: (0, deque([1, 2, {"x": table}])),
    "held.0": lambda table: {table},
    "held.data.a": lambda table: UserDict(a=table),
    "held.tables.0": lambda table: SimpleNamespace(tables=[table]),
    "held.a.module.table": lambda table: {"a": SimpleNamespace(module=asyncckpt.nn.HashEmbedding(table))},
    "held.1.table": lambda table: (0, asyncckpt.nn.HashEmbedding(table)),
    "held.0.0.table": lambda table: [itself_and(asyncckpt.nn.HashEmbedding(table))],
}


@pytest.mark.parametrize("place", PLACES)
def test_tables_are_found_wherever_a_module_holds_them(tmp_path: Path, place: str) -> None:
    table = table_named()
    module = Holder(PLACES[place](table))
    with pytest.raises(asyncckpt.UsageError) as caught:
        asyncckpt.Saver(path=tmp_path, tensors={"model": module})
    assert caught.value.found == f"model.{place} (table 'hidden')"
    save_one(tmp_path, hashtables={"t": table}, tensors={"model": module})


def test_private_containers_of_a_module_are_looked_at() -> None:
    module = torch.nn.Module()
    module._towers = [table_named()]  # type: ignore[assignment]
    assert tables_left_out(module, ()) == ("_towers.0 (table 'hidden')",)


def test_a_thing_is_looked_at_by_every_way_to_it() -> None:
    pack = SimpleNamespace(table=table_named())
    far = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Sequential(Holder([pack]))))
    root = torch.nn.ModuleDict({"near": Holder(SimpleNamespace(pack=pack)), "far": far})
    assert tables_left_out(root, ()) == ("far.0.0.0.held.0.table (table 'hidden')",)


def test_what_a_table_in_hashtables_holds_is_its_own() -> None:
    class Around:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    table: Any = Around(table_named())
    assert tables_left_out(Holder(table), [table]) == ()
    assert tables_left_out(Holder(table), ()) == ("held.inner (table 'hidden')",)


class Anything:
    """A logger that is switched off: it answers whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class NotReady:
    """Raises at every attribute, even its class and its dictionary."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"not ready: {name}")


class NoDict:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not ready")


class SilentKind(type):
    """A metaclass whose classes answer whatever they are asked, and compare to nothing."""

    def __getattr__(cls, name: str) -> Any:
        return lambda *args, **kwargs: None

    def __eq__(cls, other: object) -> bool:
        raise RuntimeError("not ready")

    __hash__ = None  # type: ignore[assignment]


class LoadsWhenRead(dict[str, Any]):
    """A mapping that imports or opens something when it is read."""

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("not ready")

    keys = values = items = __getitem__ = __iter__  # type: ignore[assignment]


class Gone:
    pass


HOSTILE: dict[str, Callable[[], Any]] = {
    "answers anything": Anything,
    "mock": MagicMock,
    "proxy of something gone": lambda: weakref.proxy(Gone()),
    "not ready": NotReady,
    "without a dictionary": NoDict,
    "metaclass": lambda: SilentKind("Silent", (), {})(),
    "reads when iterated": lambda: LoadsWhenRead(a=1, b=[]),
    "class": lambda: asyncckpt.HashTable,
    "library": lambda: torch,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_no_code_of_an_attribute_runs(tmp_path: Path, what: str) -> None:
    module = Holder([HOSTILE[what]()])
    vars(module)["other"] = HOSTILE[what]()  # torch itself asks some of them for too much.
    save_one(tmp_path, tensors={"model": module})
    module.more = [HOSTILE[what](), table_named()]  # type: ignore[assignment]
    assert tables_left_out(module, ()) == ("more.1 (table 'hidden')",)


def test_a_limit_is_kept_nearest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    nested: list[Any] = [table_named("deep")]
    for _ in range(300):
        nested = [nested]
    module = Holder(nested)
    assert len(tables_left_out(module, ())) == 1
    monkeypatch.setattr(left_out, "LOOKED_AT_MAX", 100)
    module.words = {str(number): number for number in range(1000)}  # type: ignore[assignment]
    module.near = table_named("near")
    module.below = torch.nn.Sequential(torch.nn.Sequential(Holder([table_named("below")])))
    crowd = torch.nn.Sequential(Holder([Gone() for _ in range(1000)]), module)
    assert tables_left_out(crowd, ()) == ("1.near (table 'near')", "1.below.0.0.held.0 (table 'below')")


def test_a_class_is_asked_once_whatever_a_container_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[type] = []
    kind_of = left_out._kind_of
    monkeypatch.setattr(left_out, "_kind_of", lambda cls: asked.append(cls) or kind_of(cls))
    words: dict[str, Any] = {str(number): number for number in range(1000)}
    pairs = [(str(number), number) for number in range(1000)]
    module = Holder([words, pairs, dict(enumerate(pairs)), [Gone() for _ in range(1000)]])
    assert tables_left_out({"model": module}, ()) == ()
    assert sorted(cls.__name__ for cls in asked) == ["Gone", "Holder", "Linear", "dict", "list"]


def test_an_optimizer_needs_its_tables(tmp_path: Path) -> None:
    module = asyncckpt.nn.HashEmbedding(2, name="user")
    rows = asyncckpt.optim.SparseSGD(module, lr=0.1)
    with pytest.raises(asyncckpt.UsageError, match=r"'?rows \(table 'user'\)"):
        asyncckpt.Saver(path=tmp_path, tensors={"rows": rows})
    for tables, state in (({"user": module.table}, {"rows": rows}), ({}, {"rows": TrainerState(rows=rows)})):
        with asyncckpt.Saver(path=tmp_path, hashtables=tables, tensors=state) as saver:
            saver.save()


def test_a_load_needs_the_tables_too(tmp_path: Path) -> None:
    model, other = (
        torch.nn.Sequential(asyncckpt.nn.HashEmbedding(2, name="user"), torch.nn.Linear(2, 1)) for _ in "ab"
    )
    model(torch.arange(5))
    save_one(tmp_path / "both", hashtables={"t": model[0].table}, tensors={"model": model})
    before = other[1].weight.clone()
    with pytest.raises(
        asyncckpt.IncompatibleError, match=r"model\.0\.table \(table 'user'\) would not be loaded.*\['t'\]"
    ):
        asyncckpt.Loader(tmp_path / "both", tensors={"model": other}).load()
    assert torch.equal(other[1].weight, before)
    report = asyncckpt.Loader(tmp_path / "both", tensors={"model": other}, strict=False).load()
    assert report.unexpected == ("t",)
    asyncckpt.Loader(tmp_path / "both", tensors={"model": other.state_dict()}).load()
    assert asyncckpt.Loader(tmp_path / "both", {"t": other[0].table}, {"model": other}).load().rows == {"t": 5}


def test_a_checkpoint_without_tables_loads_into_a_module_that_has_some(tmp_path: Path) -> None:
    model, other = (
        torch.nn.Sequential(asyncckpt.nn.HashEmbedding(2, name="user"), torch.nn.Linear(2, 1)) for _ in "ab"
    )
    save_one(tmp_path, tensors={"model": dict(model.state_dict())})
    asyncckpt.Loader(tmp_path, tensors={"model": other}).load()
    assert torch.equal(other[1].weight, model[1].weight)


def test_a_follower_needs_the_tables_too(tmp_path: Path) -> None:
    model = torch.nn.Sequential(asyncckpt.nn.HashEmbedding(2, name="user"), torch.nn.Linear(2, 1))
    save_one(tmp_path, hashtables={"t": model[0].table}, tensors={"model": model})

    async def load() -> None:
        async for update in asyncckpt.follow(tmp_path, until=1):
            with pytest.raises(asyncckpt.IncompatibleError, match=r"model\.0\.table"):
                await update.load(tensors={"model": model})
            await update.load({"t": model[0].table}, {"model": model})

    asyncio.run(load())


def test_a_collection_is_looked_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[object] = []
    tables_in = left_out._tables_in

    def noted(state: object, known: set[int], **options: bool) -> Any:
        walks.append(state)
        return tables_in(state, known, **options)

    monkeypatch.setattr(left_out, "_tables_in", noted)
    config = embcache.EmbCacheTableConfig("item", 2, ["f"], cache_rows=4)
    one, two = (torch.nn.ModuleList([embcache.EmbCacheEmbeddingBagCollection([config])]) for _ in "ab")
    with embcache.Saver(rank=0, world_size=1) as saver:
        for module, walks_count in ((one, 1), (one, 1), (two, 2), (two, 2)):
            saver.save(module, str(tmp_path / "sparse"))
            assert len([walk for walk in walks if walk is one or walk is two]) == walks_count
        two.append(asyncckpt.nn.HashEmbedding(2, name="user"))
        with pytest.raises(asyncckpt.UsageError, match=r"1\.table \(table 'user'\)"):
            embcache.Saver(rank=0, world_size=1).save(two, str(tmp_path / "other"))
