"""A restore into a changed model does what docs/changed-models.md says, and training goes on: compared, tensor by
tensor, with what the saved model had.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import filters, optim
from asyncckpt.errors import IncompatibleError, UsageError
from tests.untouched import looked_at
from tests.worlds.changeable import CHANGES, ChangeableModel, Facts, drawn_facts, plain

SEEDS, SEEDS_ALWAYS = range(500), (*range(18), 38, 80)  # The last two: groups of other parameters.
Changed = dict[str, Any]


def shared(target: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Return a target with what it has in common with what was stored."""
    found = target.clone()
    both = tuple(slice(min(sizes)) for sizes in zip(target.shape, stored.shape, strict=True))
    found[both] = stored[both].to(found.dtype)
    return found


class Expected:
    """What a model has after it was restored. names: {new: old} of layers and tables."""

    def __init__(self, was: ChangeableModel, now: ChangeableModel, facts: tuple[Facts, Facts], names: Changed) -> None:
        self._was, self._now, self._names = was, now, names
        self._old, self._new = facts
        net, stored = dict(now.net.state_dict()), dict(was.net.state_dict())
        self.net = {name: shared(value, stored[self.name_of(name)]) for name, value in net.items()}
        self.rows = {name: self._rows(name) for name in now.tables}
        self.steps = {name: self._steps(name) for name in now.tables}
        self.moments = self._moments() if self._takes_moments() else moments_of(now)
        self.schedule = self._schedule()

    def name_of(self, name: str) -> str:
        layer, dot, rest = name.partition(".")
        return self._names.get(layer, layer) + dot + rest

    def _has_rule(self) -> bool:
        return self._old.rule == self._new.rule

    def _rows(self, name: str) -> Any:
        table, stored = self._now.tables[name], self._was.tables.get(self._names.get(name, name))
        if stored is None:
            return table.ids(), table.read(table.ids())
        ids = stored.ids()
        was = stored.read(ids)
        rows = {  # What is not stored is as in a new row.
            column.name: torch.zeros(len(ids), *column.row_shape, dtype=column.dtype)
            for column in table.schema().columns
            if column.name in table.read(ids[:0])
        }
        return ids, {column: shared(value, was[column]) if column in was else value for column, value in rows.items()}

    def _steps(self, name: str) -> int:
        there = steps_of(self._was)
        source = self._names.get(name, name)
        if source not in there:
            return steps_of(self._now)[name]
        return there[source] if self._has_rule() else 0

    def _takes_moments(self) -> bool:
        sizes = [[len(group["params"]) for group in model.dense.param_groups] for model in (self._was, self._now)]
        return self._old.dense == self._new.dense and (self._old.is_named or sizes[0] == sizes[1])

    def _moments(self) -> Any:
        was = moments_of(self._was)
        parameters = dict(self._now.net.named_parameters())
        return {
            name: {
                key: shared(torch.full_like(parameter, self._begin(key), dtype=value.dtype), value)
                if value.dim()
                else value
                for key, value in was[self.name_of(name)].items()
            }
            for name, parameter in parameters.items()
            if self.name_of(name) in was
        }

    def _begin(self, key: str) -> float:
        option = {"sum": "initial_accumulator_value"}.get(key)
        return 0.0 if option is None else float(self._now.dense.param_groups[0][option])

    def _schedule(self) -> Any:
        """A schedule stays as it is if it is another one, of other groups, or its optimizer stays so."""
        groups = [
            [{names[parameter] for parameter in group["params"]} for group in model.dense.param_groups]
            for model in (self._was, self._now)
            for names in [{parameter: name for name, parameter in model.net.named_parameters()}]
        ]
        groups[1] = [set(map(self.name_of, group)) for group in groups[1]]
        is_same = self._old.schedule == self._new.schedule and groups[0] == groups[1]
        return (self._was if is_same and self._takes_moments() else self._now).schedule.state_dict()["last_epoch"]

    def check(self) -> None:
        now = self._now
        assert plain(dict(now.net.state_dict())) == plain(self.net)
        for name, (ids, rows) in self.rows.items():
            order = torch.argsort(ids)
            found = torch.sort(now.tables[name].ids()).values
            assert torch.equal(found, ids[order])
            assert plain(now.tables[name].read(found)) == plain({key: value[order] for key, value in rows.items()})
        assert steps_of(now) == self.steps
        assert values_of(moments_of(now)) == values_of(self.moments)
        assert now.schedule.state_dict()["last_epoch"] == self.schedule


def steps_of(model: ChangeableModel) -> dict[str, int]:
    state = model.sparse.state_dict()
    names = [name for group in state["param_groups"] for name in group["tables"]]
    return {name: state["state"].get(number, {}).get("step", 0) for number, name in enumerate(names)}


def moments_of(model: ChangeableModel) -> dict[str, dict[str, torch.Tensor]]:
    names = {id(parameter): name for name, parameter in model.net.named_parameters()}
    return {
        names[id(parameter)]: {key: value.clone() for key, value in entries.items() if isinstance(value, torch.Tensor)}
        for parameter, entries in model.dense.state.items()
    }


def values_of(moments: Any) -> Any:
    """In the dtype of the parameters, to which torch casts them."""
    return plain({name: {key: value.bfloat16() for key, value in each.items()} for name, each in moments.items()})


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed in SEEDS_ALWAYS else pytest.mark.slow) for seed in SEEDS]
)
def test_a_changed_model_gets_what_the_page_says_and_goes_on(tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    was = drawn_facts(drawn)
    was = replace(was, is_named=drawn.random() < 0.8)
    now = was
    for change in drawn.choices(CHANGES, k=drawn.choice([1, 1, 2, 3, 4])):
        now = change(now, drawn)
    if not was.is_named:  # Then nobody can tell the order.
        layers = dict(zip(was.layers, now.layers, strict=True))
        now = replace(now, order=tuple(layers[name] for name in was.order))
    trained, changed = ChangeableModel(was, seed), ChangeableModel(now, seed + 1)
    for step in range(3):
        trained.train(step)
    with asyncckpt.Checkpointer(tmp_path, every=1, options={"durability": "none"}, **trained.state()) as ckpt:
        ckpt.step(2)
    if drawn.random() < 0.5:
        changed.train(7)
    names = {new: old for old, new in zip(was.layers, now.layers, strict=True) if old != new}
    rename = {f"net.{old}": f"net.{new}" for new, old in names.items()}
    if "article" in now.tables and "item" in was.tables:
        names["article"] = "item"
        rename["item"] = "article"
    call: Changed = {"strict": False, "cast": True, "rename": rename, "resize": ["net", *now.tables]}
    trained_on: list[Any] = []
    expected = Expected(trained, changed, (was, now), names)
    with looked_at(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*it stays as it is")
        for model, first in ((changed, 3), (ChangeableModel(now, seed + 2), 4)):
            with asyncckpt.Checkpointer(tmp_path, every=1, options={"durability": "none"}, **model.state()) as ckpt:
                assert ckpt.restore(**call) == first
                if first == 3:
                    expected.check()
                else:
                    assert model.facts() == trained_on
                model.train(first)
                ckpt.step(first)
            trained_on = model.facts()


def table_of(name: str, dim: int, *, rowwise: bool = False, kind: Any = asyncckpt.HashTable, **more: Any) -> Any:
    return kind(name, dim, optimizer_slots=optim.SparseAdagrad.optimizer_slots(rowwise=rowwise), **more)


def filled(table: Any, rows_count: int = 40) -> Any:
    ids = torch.arange(rows_count)
    rows = torch.arange(rows_count * table.dim, dtype=torch.float32).view(rows_count, table.dim)
    table.insert(ids, rows, sum=rows + 0.5)
    return table


def test_rows_that_have_lost_their_slots_count_steps_from_the_start(tmp_path: Path) -> None:
    states = []
    for rowwise in (False, True):
        table = table_of("t", 4, rowwise=rowwise)
        bag = asyncckpt.nn.HashEmbeddingBag(table)
        states.append({"bag": bag, "sparse": optim.SparseAdagrad(bag, lr=0.1, lr_decay=0.1)})
    was, now = states
    was["bag"](torch.arange(6).view(3, 2)).sum().backward()
    was["sparse"].step()
    with asyncckpt.Checkpointer(tmp_path, every=1, **was) as ckpt:
        ckpt.step(0)
    with asyncckpt.Checkpointer(tmp_path, every=1, **now) as ckpt:
        assert ckpt.restore(strict=False) == 1
        assert ckpt.report is not None
        assert ckpt.report.missing == ("t@sum",)
    assert now["sparse"].state_dict()["state"] == {}
    assert torch.equal(now["bag"].table.ids(), was["bag"].table.ids())


@pytest.mark.parametrize("how", ["full", "delta", "quantized", "merged"])
@pytest.mark.parametrize("dim", [3, 6])
@pytest.mark.parametrize("kind", [asyncckpt.HashTable, asyncckpt.MultiLevelTable])
def test_rows_of_other_sizes_get_what_both_have(tmp_path: Path, how: str, dim: int, kind: Any) -> None:
    more: dict[str, Any] = {} if kind is asyncckpt.HashTable else {"cache_rows": 8}
    was, now = filled(table_of("t", 4, kind=kind, **more)), table_of("t", dim, kind=kind, **more)
    options: dict[str, Any] = {"filters": [filters.quantize("t@embedding")]} if how == "quantized" else {}
    if how == "delta":
        options["deltas"] = asyncckpt.DeltaPolicy()
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": was}, **options) as saver:
        saver.save(1)
        if how == "delta":
            was.insert(torch.tensor([7, 99]), torch.full((2, 4), -1.0), sum=torch.full((2, 4), -2.0))
            saver.save(2)
    if how == "merged":
        now.insert(torch.tensor([3, 1000]), torch.full((2, dim), 9.0), sum=torch.full((2, dim), 9.0))
    report = asyncckpt.Loader(tmp_path, hashtables={"t": now}, resize=["t"], merge=how == "merged").load()
    assert report.missing == ()
    ids = was.ids()
    stored, found = was.read(ids), now.read(ids)
    for column in ("embedding", "sum"):
        both = min(dim, 4)
        exact = how != "quantized" or column == "sum"
        torch.testing.assert_close(found[column][:, :both], stored[column][:, :both], rtol=0, atol=0 if exact else 1)
        rest, fresh = found[column][:, both:], torch.zeros(len(ids), max(0, dim - both))
        if how == "merged":
            fresh[ids == 3] = 9.0  # That row was there.
        assert torch.equal(rest, fresh)
    assert len(now) == len(was) + (how == "merged")


def test_new_columns_are_those_of_a_new_row(tmp_path: Path) -> None:
    was, now = filled(table_of("t", 4)), table_of("t", 6, initializer=asyncckpt.nn.Uniform(0.1, seed=3))
    asyncckpt.save(tmp_path, {}, hashtables={"t": was})
    asyncckpt.Loader(tmp_path, hashtables={"t": now}, resize=["t"]).load()
    new = table_of("t", 6, initializer=asyncckpt.nn.Uniform(0.1, seed=3))
    bag = asyncckpt.nn.HashEmbeddingBag(new)
    bag(torch.arange(40).view(40, 1))
    ids = torch.arange(40)
    assert torch.equal(now.read(ids)["embedding"][:, 4:], new.read(ids)["embedding"][:, 4:])
    assert torch.equal(now.read(ids)["embedding"][:, :4], was.read(ids)["embedding"])


@pytest.mark.parametrize("shards", [1, 3])
def test_shards_are_renamed_and_resized_too(tmp_path: Path, shards: int) -> None:
    was = filled(table_of("t", 4))
    asyncckpt.save(tmp_path, {"x": torch.ones(2)}, hashtables={"t": was})
    for index in range(shards):
        now = table_of("new", 5, shard=(index, shards))
        asyncckpt.Loader(tmp_path, hashtables={"new": now}, rename={"t": "new"}, resize=["new"]).load()
        ids = torch.arange(index, 40, shards)
        assert torch.equal(now.ids().sort().values, ids)
        assert torch.equal(now.read(ids)["embedding"][:, :4], was.read(ids)["embedding"])


CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown name": ({"rename": {"q": "z"}}, UsageError, r"rename has unknown names.*\['q'\]"),
    "no mapping": ({"rename": ["x"]}, UsageError, "rename must be a mapping"),
    "resize of nothing": (
        {"resize": ["q"]},
        UsageError,
        r"resize has unknown names, found \['q'\]",
    ),
    "resize by text": ({"resize": "x"}, UsageError, "resize must be"),
    "shape": ({"strict": False}, IncompatibleError, r"'x' has shape \(3,\), the checkpoint \(2,\).*resize=\[names\]"),
    "dimensions": ({"resize": ["y"]}, IncompatibleError, r"'y' has shape \(2, 2\), the checkpoint \(4,\)"),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_makes_no_sense_is_refused_with_nothing_changed(tmp_path: Path, call: str) -> None:
    asyncckpt.save(tmp_path, {"x": torch.ones(2), "y": torch.ones(4)})
    how, error, match = CALLS[call]
    state = {"x": torch.zeros(3), "y": torch.zeros(2, 2)}
    with asyncckpt.Checkpointer(tmp_path, every=1, **state) as ckpt:
        with pytest.raises(error, match=match):
            ckpt.restore(**how)
        with pytest.raises(error, match=match):
            asyncckpt.Loader(tmp_path, tensors=state, **how).load()
    assert not any(value.any() for value in state.values())


def test_an_object_that_stays_as_it_is_is_told_before_anything_is_filled(tmp_path: Path) -> None:
    """A warning may be an error."""
    net = torch.nn.Linear(2, 2)
    asyncckpt.save(tmp_path, {"net": net, "optim": torch.optim.AdamW(net.parameters())})
    other = torch.nn.Linear(2, 2)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    state = {"net": other, "optim": torch.optim.SGD(other.parameters(), lr=0.1)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match=r"'optim' is of class 'SGD'.*; it stays as it is"):
            asyncckpt.Loader(tmp_path, tensors=state, strict=False).load()
    assert plain(dict(other.state_dict())) == plain(before)
