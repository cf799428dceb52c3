"""Mappings that are no dicts: those without a truth, whose length is not that of their keys, or whose tensors are made
at each look, as in tensordict."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import asyncckpt


class RowBatch(MutableMapping[str, Any]):
    """As a TensorDict: its length and what iterates over it are those of the rows, and it has no truth."""

    def __init__(self, rows: int, **found: Any) -> None:
        self.rows, self.found = rows, found

    def __bool__(self) -> bool:
        raise RuntimeError("the truth of a batch is ambiguous")

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[Any]:
        yield from (RowBatch(0, **{name: value[row] for name, value in self.found.items()}) for row in range(self.rows))

    def __contains__(self, key: object) -> bool:
        raise NotImplementedError("use keys()")

    def __getitem__(self, key: str) -> Any:
        return self.found[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.found[key] = value

    def __delitem__(self, key: str) -> None:
        del self.found[key]

    def keys(self) -> Any:
        return self.found.keys()

    def values(self) -> Any:
        return self.found.values()

    def items(self) -> Any:
        return self.found.items()


class Stacked(RowBatch):
    """As a lazily stacked TensorDict: what it returns is made at each look."""

    def __getitem__(self, key: str) -> Any:
        return self.found[key].clone()

    def values(self) -> Any:
        return [self[key] for key in self.found]


def batch(fill: float, rows: int = 4) -> RowBatch:
    return RowBatch(
        rows, a=torch.full((rows, 2), fill), deep=RowBatch(rows, b=torch.full((rows,), fill)), none=RowBatch(rows)
    )


@pytest.mark.parametrize("rows", [4, 0])
def test_it_is_saved_and_filled_in_place(tmp_path: Path, rows: int) -> None:
    source, target = batch(3.0, rows), batch(0.0, rows)
    own = target["deep"]["b"]
    asyncckpt.save(tmp_path / "d", {"replay": source})
    asyncckpt.Loader(tmp_path / "d", tensors={"replay": target}).load()
    assert torch.equal(target["a"], source["a"])
    assert torch.equal(own, source["deep"]["b"])
    found = asyncckpt.load(tmp_path / "d")["replay"]
    assert (list(found), list(found["deep"]), found["none"]) == (["a", "deep", "none"], ["b"], {})


@pytest.mark.parametrize("rows", [4, 0])
def test_a_checkpointer_takes_it(tmp_path: Path, rows: int) -> None:
    source, target = batch(3.0, rows), batch(0.0, rows)
    source["step"], target["step"] = 5, 0
    with asyncckpt.Checkpointer(tmp_path / "d", every=1, replay=source) as ckpt:
        ckpt.step(0)
        ckpt.step(1)
    with asyncckpt.Checkpointer(tmp_path / "d", every=9, replay=target) as ckpt:
        ckpt.restore()
    assert torch.equal(target["a"], source["a"])
    assert target["step"] == 5


def test_one_whose_tensors_are_made_at_each_look_is_saved_and_refused_as_a_target(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "d", {"replay": Stacked(2, a=torch.ones(2))})
    assert asyncckpt.load(tmp_path / "d")["replay"]["a"].tolist() == [1.0, 1.0]
    with pytest.raises(asyncckpt.UsageError, match=r"Stacked gives another tensor 'replay\.a' at each look"):
        asyncckpt.Loader(tmp_path / "d", tensors={"replay": Stacked(2, a=torch.zeros(2))}).load()


class ByKeys(dict[str, Any]):
    """As people write it, for `config.width`: for a name that is no key it raises a KeyError."""

    __getattr__ = dict.__getitem__


class AnyName(dict[str, Any]):
    """As addict's: it has an attribute of any name."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name, AnyName())


class OwnMetadata(dict[str, Any]):
    """What it calls so is not what torch does."""

    _metadata: ClassVar[Any] = ["by the user"]


@pytest.mark.parametrize("kind", [ByKeys, AnyName, OwnMetadata])
def test_a_dict_with_attributes_of_its_own_is_a_dict(tmp_path: Path, kind: type[dict[str, Any]]) -> None:
    made = kind(w=torch.ones(2), deep=kind(lr=0.5))
    with asyncckpt.Saver(path=tmp_path / "whole", tensors=made) as saver:
        saver.save(0)
    with asyncckpt.Checkpointer(tmp_path / "part", every=1, config=made) as ckpt:
        ckpt.step(0)
    target = kind(w=torch.zeros(2), deep=kind(lr=0.0))
    with asyncckpt.Checkpointer(tmp_path / "part", every=1, config=target) as ckpt:
        assert ckpt.restore() == 1
    for found in (asyncckpt.load(tmp_path / "whole"), target):
        assert torch.equal(found["w"], torch.ones(2))
        assert found["deep"] == {"lr": 0.5}


class TableByIds(dict[int, Any]):
    """A table of somebody's own, which is a mapping of its ids, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = asyncckpt.HashTable("item", dim=1)

    name = property(lambda self: self.table.name)
    shard = property(lambda self: self.table.shard)
    schema = property(lambda self: self.table.schema)
    begin_cut = property(lambda self: self.table.begin_cut)
    begin_load = property(lambda self: self.table.begin_load)


def test_a_table_that_is_a_mapping_is_a_table(tmp_path: Path) -> None:
    made, target = TableByIds(), TableByIds()
    made.table.lookup(torch.arange(3))
    with asyncckpt.Checkpointer(tmp_path, every=1, item=made) as ckpt:
        ckpt.step(0)
    with asyncckpt.Checkpointer(tmp_path, every=1, item=target) as ckpt:
        ckpt.restore()
    assert len(target.table) == 3
