"""Plain values come back from JSON as what they were, and nothing else gets in or out."""

from __future__ import annotations

import json
import re
from collections import OrderedDict, UserDict
from enum import Enum
from typing import Any

import pytest
import torch

from asyncckpt.errors import CorruptError, UnsupportedError, UsageError
from asyncckpt.format.values import decode_value, encode_value

pytestmark = pytest.mark.any_core

KINDS = [
    set(),
    {1, "two", 3.5, None, (4, frozenset([5]))},
    frozenset(),
    frozenset({b"x", 2**70}),
    OrderedDict(),
    OrderedDict([("b", 1), ("a", {2}), (3, OrderedDict(c=[slice(1)]))]),
    torch.float8_e4m3fn,
    torch.bool,
    torch.Size([]),
    torch.Size([2, 0, 2**40]),
    torch.device("cpu"),
    torch.device("cuda", 3),
    torch.device("meta"),
    slice(None),
    slice(1, 2**60, -3),
    slice("a", (1, 2.5), None),
    range(0),
    range(-5, 2**70, 7),
    {"nested": ([{frozenset([torch.int8])}],), range(3): slice(None, range(2))},
]


def there_and_back(value: Any) -> Any:
    return decode_value(json.loads(json.dumps(encode_value(value, owner="it"))), owner="it")


def same(found: Any, value: Any) -> bool:
    if type(found) is not type(value) or found != value:
        return False
    if isinstance(value, dict):
        return all(map(same, found, value)) and all(map(same, found.values(), value.values()))
    return all(map(same, found, value)) if isinstance(value, (list, tuple)) else True


@pytest.mark.parametrize("value", KINDS, ids=lambda value: type(value).__name__)  # A set prints in any order.
def test_values_keep_their_type(value: Any) -> None:
    assert same(there_and_back(value), value)
    assert same(there_and_back([{"deep": (value,)}]), [{"deep": (value,)}])


def test_a_set_is_encoded_the_same_whatever_its_order() -> None:
    """Ranks compare what they encode; the order of texts in a set differs from process to process."""
    names = [f"name{number}" for number in range(50)]
    assert encode_value(set(names), owner="it") == encode_value(set(reversed(names)), owner="it")
    assert encode_value({8, 0}, owner="it") == encode_value({0, 8}, owner="it")


class Color(Enum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({object()}, "an item of 'x'"),
        (frozenset({Color.RED}), "an item of 'x'"),
        ([{1, Color.RED}], "an item of 'x'[0]"),
        (slice(object(), 2), "start of 'x'"),
        (slice(1, 2, [Color.RED]), "step of 'x'[0]"),
        (OrderedDict(a=object()), "'x'['a']"),
        (torch.strided, "'x'"),
        (memoryview(b""), "'x'"),
    ],
)
def test_what_is_not_plain_is_refused_by_its_path(value: Any, named: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{named} has type")):
        encode_value(value, owner="'x'")


class Frozen(UserDict[str, int]):
    def __hash__(self) -> int:  # type: ignore[override]
        return 1


class Apart(str):
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = str.__hash__


@pytest.mark.parametrize(
    "value",
    [
        {Frozen(a=1)},
        frozenset({(1, Frozen(a=1))}),
        {Apart("a"), "a"},
        {"deep": [{Frozen()}]},
        torch.device("cuda", 127 + 1),  # torch makes it cuda:-128.
    ],
    ids=["mapping", "deep mapping", "equal texts", "in a dict", "device"],
)
def test_what_would_not_come_back_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="would not come back"):
        encode_value(value, owner="'x'")


@pytest.mark.parametrize(
    "damaged",
    [
        {"set": [1, 1]},
        {"set": [[1]]},
        {"set": {"tuple": []}},
        {"frozenset": [{"dict": []}]},
        {"frozenset": "text"},
        {"ordered": [["a", 1], ["a", 2]]},
        {"ordered": [["a"]]},
        {"ordered": [[[], 1]]},
        {"ordered": 3},
        {"dtype": "Tensor"},
        {"dtype": "no such dtype"},
        {"dtype": ["float32"]},
        {"size": ["a"]},
        {"size": [2.5]},
        {"size": [2**70]},
        {"size": [True]},
        {"size": 5},
        {"device": "no such device"},
        {"device": "cuda:x"},
        {"device": "cuda:300"},
        {"device": 0},
        {"slice": [1, 2]},
        {"slice": 3},
        {"range": [1, 2, 0]},
        {"range": [1, 2]},
        {"range": [1, 2, None]},
        {"range": [1, True, 1]},
        {"range": "abc"},
    ],
    ids=json.dumps,
)
def test_damaged_values_are_corrupt(damaged: Any) -> None:
    with pytest.raises(CorruptError, match="it holds"):
        decode_value(damaged, owner="it")


@pytest.mark.parametrize("unknown", [{"dtype": "float3"}, {"dtype": "onnx"}, {"device": "abacus:1"}], ids=json.dumps)
def test_what_this_torch_lacks_is_no_damage(unknown: Any) -> None:
    """The file is sound, and a load that may fall back does not go past it to an older step."""
    with pytest.raises(UnsupportedError, match="has no"):
        decode_value(unknown, owner="it")


@pytest.mark.parametrize("kind", ["set", "frozenset"])
def test_sets_cannot_be_nested_without_end(kind: str) -> None:
    value: Any = 1
    for _ in range(100):
        value = {"tuple": [{kind: [value]}]}
    with pytest.raises(CorruptError, match="nested too deeply"):
        decode_value(value, owner="it")
