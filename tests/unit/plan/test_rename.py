"""Trees get other names with few comparisons, and no name comes twice."""

from __future__ import annotations

import pytest
import torch

from asyncckpt.errors import UsageError
from asyncckpt.plan.rename import Names

KEYS_COUNT = 300


class _Counted(str):
    comparisons_count = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        _Counted.comparisons_count += 1
        return str.__eq__(self, other)


def test_names_are_not_compared_each_with_each() -> None:
    keys = tuple(_Counted(f"layer{number}.weight") for number in range(KEYS_COUNT))
    _, renamed, _ = Names.of({"layer0": "first"}).tree(("dict", keys, (("tensor",),) * KEYS_COUNT))
    assert _Counted.comparisons_count < 20 * KEYS_COUNT
    assert renamed == ("first.weight", *keys[1:])


def test_two_that_become_the_same_are_refused() -> None:
    node = ("dict", ("a", "b"), (("tensor",), ("tensor",)))
    with pytest.raises(UsageError, match=r"same name, found 'b'"):
        Names.of({"a": "b"}).tree(node)


@pytest.mark.parametrize("new", [{}, {"other": "o"}, {"y": "z"}])
def test_an_empty_key_stays(new: dict[str, str]) -> None:
    """It came out in a checkpoint of DCP, and did not come in again."""
    name = new.get("y", "y")
    paths = [("",), ("", "a"), ("y", ""), ("y", "", ("int", 0))]
    assert [Names.of(new).path(path) for path in paths] == [("",), ("", "a"), (name, ""), (name, "", ("int", 0))]
    with pytest.raises(UsageError, match="cannot become 'q'"):
        Names.of({"y.": "q"}).path(("y", ""))


@pytest.mark.parametrize("kind", ["list", "tuple"])
def test_a_position_in_a_list_has_no_other_name(kind: str) -> None:
    layers = [{"weight": torch.ones(2)}, {"weight": torch.zeros(3)}]
    state = {"model": {"layers": layers if kind == "list" else tuple(layers)}}
    with pytest.raises(UsageError, match=r"'model\.layers\.1' is a position in a list"):
        Names.of({"model.layers.1": "model.layers.0"}).state(state)
    found = Names.of({"model": "tower", "model.layers.1.weight": "tower.layers.1.bias"}).state(state)
    assert [list(layer) for layer in found["tower"]["layers"]] == [["weight"], ["bias"]]
