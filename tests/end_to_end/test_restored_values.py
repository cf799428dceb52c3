"""A Checkpointer puts plain values back into dicts and lists of the program, whatever is beside them."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import asyncckpt
from asyncckpt.modules.named_parts import is_plain
from tests.end_to_end.trees import differences, live, whole_states

Pair = namedtuple("Pair", ["first", "second"])
CASES: dict[str, tuple[Any, Any]] = {
    "set": ({"epoch": 3, "done": {1, 2}}, {"epoch": 0, "done": set()}),
    "size and dtype": ({"size": torch.Size([2]), "in": torch.float64}, {"size": None, "in": torch.float32}),
    "ordered dict": (OrderedDict(epoch=3), OrderedDict(epoch=0)),
    "counter": (Counter(a=2, b=1), Counter(a=7)),
    "default dict": (defaultdict(int, epoch=3), defaultdict(int)),
    "list": ([1, [2]], [0]),
    "longer list": ([1], [0, 5, 6]),
    "longer beside a tensor": ([[1], torch.ones(1)], [[0, 5, 6], torch.zeros(1)]),
    "numpy that came later": ([[np.float64(1)], torch.ones(1), np.int8(5)], [[], torch.zeros(1)]),
    "beside a tensor": ({"ema": torch.ones(2), "epoch": 3}, {"ema": torch.zeros(2), "epoch": 0}),
    "that came later": ({"ema": torch.ones(2), "seen": [1, {2}], 7: "b"}, {"ema": torch.zeros(2), "seen": []}),
    "deep": (
        {"a": [torch.ones(1), {"b": 5, "c": torch.ones(1)}]},
        {"a": [torch.zeros(1), {"b": 0, "c": torch.zeros(1)}]},
    ),
    "in a tuple": (
        ({"a": 1}, [[2], (3, [4])], (5, [6]), torch.ones(1)),
        ({"a": 0}, [[0], (3, [0])], (5, [0]), torch.zeros(1)),
    ),
    "in a tuple in a dict": (
        {"best": (0.5, torch.ones(1), [1], Pair(2, torch.ones(1)))},
        {"best": (None, torch.zeros(1), [], Pair(0, torch.zeros(1)))},
    ),
    "in tuples in a list": ([((1, torch.ones(1)), 2)], [((0, torch.zeros(1)), 0)]),
    "deep in a tuple": (({"a": 1, "t": torch.ones(1)},), ({"a": 0, "t": torch.zeros(1)},)),
    "one name for two": (
        {"a.b": 1, "a": {"b": 2, "t": torch.ones(1)}},
        {"a.b": 0, "a": {"b": 0, "t": torch.zeros(1)}},
    ),
    "numpy": (
        {"t": torch.ones(1), "n": np.float32(2.5), "a": np.ones(2)},
        {"t": torch.zeros(1), "n": np.float32(0), "a": np.zeros(2)},
    ),
}


def nested(losses: list[int], counts: dict[str, int], pair: Pair, **more: Any) -> dict[str, Any]:
    return {"losses": losses, "again": losses, "deep": {"counts": counts, "pair": pair}, **more}


@pytest.mark.parametrize("more", [{}, {"ema": torch.ones(1)}], ids=["plain", "beside a tensor"])
def test_containers_in_containers_stay_the_same(tmp_path: Path, more: dict[str, Any]) -> None:
    with asyncckpt.Checkpointer(tmp_path, every=1, all=nested([1, 2], Counter(a=3), Pair(5, [6]), **more)) as ckpt:
        ckpt.step(0)
    losses, counts, pair = [0], defaultdict[str, int](int, b=1), Pair(0, [0, 0])
    new = nested(losses, counts, pair, **more)
    with asyncckpt.Checkpointer(tmp_path, every=9, all=new) as ckpt:
        ckpt.restore()
    assert (losses, dict(counts)) == ([1, 2], {"a": 3})
    assert new["losses"] is new["again"] is losses
    assert new["deep"]["counts"] is counts
    assert counts["c"] == 0
    assert (new["deep"]["pair"].second, pair.second) == ([6], [6])


@pytest.mark.parametrize("more", [{}, {"ema": torch.ones(1)}], ids=["plain", "beside a tensor"])
def test_one_container_at_two_places_takes_no_two_values(tmp_path: Path, more: dict[str, Any]) -> None:
    with asyncckpt.Checkpointer(tmp_path, every=1, all={"a": [1], "b": [2], **more}) as ckpt:
        ckpt.step(0)
    empty: list[int] = []
    new = {"a": empty, "b": empty, **more}
    with asyncckpt.Checkpointer(tmp_path, every=9, all=new) as ckpt:
        ckpt.restore()
    assert (new["a"], new["b"]) == ([1], [2])


@pytest.mark.parametrize(("saved", "new"), CASES.values(), ids=CASES)
def test_values_come_back_in_place(tmp_path: Path, saved: Any, new: Any) -> None:
    new = copy.deepcopy(new)
    with asyncckpt.Checkpointer(tmp_path, every=1, progress=saved) as ckpt:
        ckpt.step(0)
    with asyncckpt.Checkpointer(tmp_path, every=9, progress=new) as ckpt:
        assert ckpt.restore() == 1
    assert repr(new) == repr(saved)


def test_tensors_and_objects_stay_the_same(tmp_path: Path) -> None:
    old = {"model": torch.nn.Linear(1, 1), "epoch": 3, "ema": torch.ones(2)}
    model, ema = torch.nn.Linear(1, 1), torch.zeros(2)
    with asyncckpt.Checkpointer(tmp_path, every=1, all=old) as ckpt:
        ckpt.step(0)
    new = {"model": model, "epoch": 0, "ema": ema, "added": 5}
    with asyncckpt.Checkpointer(tmp_path, every=9, all=new) as ckpt:
        with pytest.raises(asyncckpt.IncompatibleError, match=r"only in this state .*added'"):
            ckpt.restore()
        assert new["epoch"] == 0
        del new["added"]
    with asyncckpt.Checkpointer(tmp_path, every=9, all=new) as ckpt:
        ckpt.restore()
        assert ckpt.report is not None
        assert ckpt.report.values == {"all.epoch": 3}
    assert new["model"] is model
    assert new["ema"] is ema
    assert (new["epoch"], ema.tolist()) == (3, [1, 1])


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(whole_states, st.data())
def test_any_state_comes_back_into_another_one(state: dict[str, Any], data: st.DataObject) -> None:
    root, new = Path(tempfile.mkdtemp(prefix="asyncckpt-values-")), other(state, data)
    try:
        with asyncckpt.Checkpointer(root, every=1, all=state) as ckpt:
            ckpt.step(0)
        with asyncckpt.Checkpointer(root, every=9, all=new) as ckpt:
            assert ckpt.restore() == 1
        assert list(differences(new, live(state))) == []
    finally:
        shutil.rmtree(root)


def other(value: Any, data: st.DataObject) -> Any:
    """Return what a new process may have in the place of a value: tensors alike, other values, fewer of them."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return torch.empty_like(value) if isinstance(value, torch.Tensor) else np.zeros_like(value)
    if isinstance(value, dict):
        return {key: other(value[key], data) for key in kept(list(value), list(value.values()), data)}
    if isinstance(value, list):
        return [other(item, data) for item in kept(value, value, data)]
    if isinstance(value, tuple):
        return tuple(other(item, data) for item in value)
    return data.draw(st.sampled_from([value, None, 7, "other"]))


def kept(items: list[Any], values: list[Any], data: st.DataObject) -> list[Any]:
    """Leave out some of the plain ones at the end."""
    count = len(items)
    while count and is_plain(values[count - 1]) and data.draw(st.booleans()):
        count -= 1
    return items[:count]
