"""Load filters that rename see what only the model has, and what only the checkpoint has; nothing is lost quietly."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from tests.end_to_end.state import filled_table, new_table
from tests.worlds.rows import table_image

Info = dict[str, dict[str, list[str]]]
COLUMNS = ["id", "embedding", "sum", "momentum", "last_seen"]


class CountingNet(torch.nn.Module):
    """A module that counts the calls of a hook of load_state_dict."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.hooks_called = 0
        self.register_load_state_dict_post_hook(self.count)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(fill)

    def count(self, *_: Any) -> None:
        self.hooks_called += 1

    def is_filled_with(self, value: float) -> bool:
        return all(bool(parameter.eq(value).all()) for parameter in self.parameters())


@pytest.fixture
def old(tmp_path: Path) -> asyncckpt.HashTable:
    table = filled_table("old", rows=50, seed=1)
    state = {"old_net": CountingNet(1.0), "old_w": torch.ones(4), "same": torch.ones(2), "epoch": 3}
    asyncckpt.save(tmp_path / "d", state, hashtables={"old": table})
    return table


def renamed(info: Info) -> Info:
    """As a filter for RecIS does it: over destinations, never over sources."""
    return {
        to: {source.replace("new", "old"): columns for source, columns in sources.items()}
        for to, sources in info.items()
    }


def test_a_filter_over_destinations_renames(tmp_path: Path, old: asyncckpt.HashTable) -> None:
    table, net, w, same = new_table("new"), CountingNet(0.0), torch.zeros(4), torch.zeros(2)
    tensors = {"new_net": net, "new_w": w, "same": same}
    report = asyncckpt.Loader(tmp_path / "d", {"new": table}, tensors, filter_func=renamed).load()
    assert table_image(table) == table_image(old)
    assert net.is_filled_with(1)
    assert (w.tolist(), same.tolist(), net.hooks_called) == ([1] * 4, [1] * 2, 1)
    assert report.loaded["new_net.linear.weight"] == {"old_net.linear.weight": []}
    assert (report.missing, report.unexpected) == ((), ())


def test_a_filter_sees_what_only_one_side_has(tmp_path: Path, old: asyncckpt.HashTable) -> None:
    seen: list[Any] = []
    loader = asyncckpt.Loader(
        tmp_path / "d",
        {"new": new_table("new")},
        {"new_w": torch.zeros(4), "same": torch.zeros(2)},
        filter_func=lambda info: seen.append(info) or info,
        strict=False,
    )
    assert loader.load().missing == ("new", "new_w")
    assert seen == [{"new": {"new": COLUMNS}, "new_w": {"new_w": []}, "same": {"same": []}}]
    weights = {"old_net.linear.weight": [], "old_net.linear.bias": []}
    assert seen[0].sources == {"old": COLUMNS, "old_w": [], "same": [], **weights}


def test_what_a_filter_leaves_under_its_own_name_is_missing(tmp_path: Path, old: asyncckpt.HashTable) -> None:
    net, w = CountingNet(0.0), torch.zeros(4)
    targets: dict[str, Any] = {"hashtables": {"new": new_table("new")}, "tensors": {"new_net": net, "new_w": w}}
    messages = []
    for function in (None, lambda info: info, lambda info: {to: {to: []} for to in info}):
        with pytest.raises(asyncckpt.IncompatibleError, match=r"only in this state \(5\): 'new'") as caught:
            asyncckpt.Loader(tmp_path / "d", **targets, filter_func=function).load()
        messages.append(str(caught.value))
    assert len({*messages}) == 1
    with pytest.raises(asyncckpt.IncompatibleError, match=r"only in this state \(1\): 'new_net\.linear\.bias'"):
        asyncckpt.Loader(
            tmp_path / "d",
            tensors={"new_net": net},
            filter_func=lambda info: (
                renamed({k: v for k, v in info.items() if "weight" in k})
                | {k: v for k, v in info.items() if "bias" in k}
            ),
        ).load()
    assert net.is_filled_with(0)


def test_what_a_filter_drops_is_not_missing(tmp_path: Path, old: asyncckpt.HashTable) -> None:
    table, net, same = filled_table("new", rows=5, seed=2), CountingNet(7.0), torch.zeros(2)
    before = table_image(table)
    loader = asyncckpt.Loader(
        tmp_path / "d", {"new": table}, {"new_net": net, "same": same}, filter_func=lambda info: {"same": info["same"]}
    )
    assert loader.load().missing == ()
    assert table_image(table) == before
    assert net.is_filled_with(7)
    assert (net.hooks_called, same.tolist()) == (0, [1, 1])


def test_columns_that_the_other_table_lacks(tmp_path: Path, old: asyncckpt.HashTable) -> None:
    """They pass where those of a table of the same name do; what a filter asks for by itself does not."""
    for strict in (True, False):
        table = asyncckpt.HashTable("new", 8, optimizer_slots={"sum": (), "more": ()})
        loader = asyncckpt.Loader(tmp_path / "d", {"new": table}, filter_func=renamed, strict=strict)
        if strict:
            with pytest.raises(asyncckpt.IncompatibleError, match="changed: column 'more' of table 'new' is"):
                loader.load()
            continue
        assert loader.load().loaded == {"new": {"old": ["id", "embedding", "sum"]}}
        assert len(table) == len(old)

        def ask(info: Info) -> Info:
            return {"new": {"old": ["id", "else"]}}

        with pytest.raises(asyncckpt.IncompatibleError, match="column 'else' of table 'new' is not in the checkpoint"):
            asyncckpt.Loader(tmp_path / "d", {"new": table}, filter_func=ask, strict=False).load()


def test_a_source_that_is_not_there_is_an_error(tmp_path: Path, old: asyncckpt.HashTable) -> None:
    for strict in (True, False):
        loader = asyncckpt.Loader(
            tmp_path / "d", tensors={"w": torch.zeros(4)}, filter_func=lambda info: {"w": {"lost": []}}, strict=strict
        )
        with pytest.raises(asyncckpt.IncompatibleError, match="source 'lost' of 'w' is not in the checkpoint"):
            loader.load()


def test_tied_weights_are_missing_under_no_name(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "d", {"old": torch.ones(3)})
    weight = torch.zeros(3)
    tensors = {"new": weight, "tied": weight}
    asyncckpt.Loader(tmp_path / "d", tensors=tensors, filter_func=renamed).load()
    assert weight.tolist() == [1, 1, 1]


# -- Nothing at all ----------------------------------------------------------------------------------------------------


def load_async(loader: asyncckpt.Loader) -> asyncckpt.LoadReport:
    return loader.load_async().result(60)


@pytest.mark.parametrize("load", [asyncckpt.Loader.load, load_async])
def test_a_load_of_nothing_warns(
    tmp_path: Path, old: asyncckpt.HashTable, load: Callable[[asyncckpt.Loader], asyncckpt.LoadReport]
) -> None:
    tensors = {f"w{index}": torch.zeros(4) for index in range(10)}
    loader = asyncckpt.Loader(tmp_path / "d", {"new": new_table("new")}, tensors, strict=False)
    with pytest.warns(
        RuntimeWarning, match="nothing was loaded from step 0 of .*lacks 'new', 'w0'.* and 3 more.*'old'"
    ):
        report = load(loader)
    assert report.is_empty
    assert "is_empty=True" in repr(report)
    assert not any(tensor.any() for tensor in tensors.values())


def test_the_warning_names_the_line_of_the_caller(tmp_path: Path, old: asyncckpt.HashTable) -> None:
    with pytest.warns(RuntimeWarning, match="nothing was loaded") as caught:
        asyncckpt.Loader(tmp_path / "d", tensors={"w": torch.zeros(4)}, strict=False).load()
    assert [item.filename for item in caught] == [__file__]


@pytest.mark.parametrize(
    "tensors",
    [{"same": torch.zeros(2), "w": torch.zeros(4)}, {"epoch": 0, "w": torch.zeros(4)}, {}],
    ids=["a tensor", "a value", "nothing wanted"],
)
def test_a_load_of_something_does_not_warn(
    tmp_path: Path, old: asyncckpt.HashTable, tensors: dict[str, torch.Tensor]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = asyncckpt.Loader(tmp_path / "d", tensors=tensors, strict=False).load()
    assert not report.is_empty


def test_a_filter_that_drops_all_of_a_strict_load_does_not_warn(tmp_path: Path, old: asyncckpt.HashTable) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = asyncckpt.Loader(tmp_path / "d", tensors={"same": torch.zeros(2)}, filter_func=lambda info: {})
        assert loader.load().is_empty
