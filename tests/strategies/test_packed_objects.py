"""Objects go into a checkpoint without pickle, and come back as what they were."""

from __future__ import annotations

import argparse
import http
import io
import math
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from asyncckpt.errors import CorruptError, NotFoundError, UsageError
from asyncckpt.strategies.packed_objects import pack, unpack

pytestmark = pytest.mark.any_core


Point = namedtuple("Point", "x y")


class NamedBatch(NamedTuple):
    """One whose own way of being made would do something."""

    rows: Any
    shape: torch.Size = torch.Size([])


class Checked(NamedBatch):
    def __new__(cls, *_: Any) -> Checked:
        raise AssertionError("code of a class that a checkpoint names was run")


class LevelText(str, Enum):
    HIGH = "high"


class Backend(Enum):
    FLASH = 1
    AUTO = "auto"


def there_and_back(value: Any) -> Any:
    return unpack(pack(value), owner="it")


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        7,
        -0.0,
        "text",
        b"short",
        b"long" * 1000,
        1 + 2j,
        np.float32(0.5),
        np.int64(3),
        [],
        {},
        (),
        [1, (2, [3, {"a": (4,)}])],
        {1: "int", "1": "str", None: 0, 2.5: 1},
        torch.float8_e4m3fn,
        torch.Size([2, 3]),
        argparse.Namespace(a=1, b=argparse.Namespace(c=[torch.bfloat16])),
        {"x": [torch.Size([]), b"q" * 300]},
        argparse.Namespace(backend=Backend.AUTO, other=[Backend.FLASH]),
        http.HTTPStatus.OK,
        LevelText.HIGH,
        {1, "two", (3.0, None)},
        frozenset([torch.float16, frozenset()]),
        OrderedDict(b=OrderedDict(), a=[{2}]),
        {"counts": Counter("aab"), "more": [defaultdict(list, a=[Counter()])]},
        Counter({"a": 2}),
        defaultdict(int, a=1),
        Point(1, {"deep": [Point(Backend.AUTO, b"q" * 300)]}),
        NamedBatch(rows=[1], shape=torch.Size([3])),
        tuple.__new__(Checked, ({2}, torch.Size([3]))),
        torch.device("cuda", 1),
        [slice(1, None), range(2, 9, 3)],
    ],
)
def test_plain_and_special_values(value: Any) -> None:
    found = there_and_back(value)
    assert found == value
    assert type(found) is type(value)


def test_what_torch_says_of_modules_is_kept() -> None:
    state: Any = torch.nn.BatchNorm1d(2).state_dict()
    found = there_and_back([{"model": state}])[0]["model"]
    assert dict(found._metadata) == dict(state._metadata) == {"": {"version": 2}}


def test_nan_and_minus_zero_are_kept() -> None:
    assert math.isnan(there_and_back(float("nan")))
    assert math.copysign(1.0, there_and_back(-0.0)) == -1.0


@pytest.mark.parametrize("raw", [b"", b"hello", bytes(range(256)) * 3])
def test_bytes_io_comes_back_at_its_begin(raw: bytes) -> None:
    buffer = io.BytesIO(raw)
    buffer.seek(0, io.SEEK_END)
    found = there_and_back({"state": [buffer]})["state"][0]
    assert isinstance(found, io.BytesIO)
    assert found.tell() == 0
    assert found.getvalue() == raw
    assert buffer.tell() == len(raw)


def test_tensors_and_arrays_are_not_copied() -> None:
    tensor, array = torch.ones(3), np.ones(2)
    packed = pack({"t": tensor, "a": [array]})
    assert packed["value"]["t"] is tensor
    assert packed["value"]["a"][0] is array
    assert packed["kinds"] == []


def test_a_member_of_an_enum_is_the_very_same() -> None:
    assert there_and_back(Backend.FLASH) is Backend.FLASH


def test_an_enum_that_is_not_loaded_is_told_and_never_imported() -> None:
    packed = {"value": ["wave", "Chunk", "x"], "kinds": [((), "Enum")]}
    assert "wave" not in sys.modules
    with pytest.raises(NotFoundError, match=r"wave\.Chunk\.x"):
        unpack(packed, owner="it")
    assert "wave" not in sys.modules


def test_a_named_tuple_that_is_not_loaded_or_has_other_fields_is_told() -> None:
    packed = {"value": {"nchannels": 1}, "kinds": [((), ["wave", "_wave_params"])]}
    with pytest.raises(NotFoundError, match=r"named tuple of nchannels.*wave\._wave_params.*import its module"):
        unpack(packed, owner="it")
    assert "wave" not in sys.modules
    packed = pack(Point(1, 2))
    packed["value"]["z"] = packed["value"].pop("y")
    with pytest.raises(NotFoundError, match=r"named tuple of x, z.*Point"):
        unpack(packed, owner="it")


@pytest.mark.parametrize("named", [["os", "environ"], ["builtins", "tuple"], ["builtins", "dict"], ["os", "system"]])
@pytest.mark.parametrize("value", [{}, {"x": 1}])
def test_only_named_tuples_are_found(named: list[str], value: dict[str, Any]) -> None:
    with pytest.raises(NotFoundError):
        unpack({"value": value, "kinds": [((), named)]}, owner="it")


@pytest.mark.parametrize("named", [["os", "environ", "x"], ["sys", "modules", "os"], ["os", "path", "sep"]])
def test_only_members_of_enums_are_found(named: list[str]) -> None:
    with pytest.raises(NotFoundError):
        unpack({"value": named, "kinds": [((), "Enum")]}, owner="it")


class Other:
    pass


class Local:
    """Holds an enum that nobody finds by its name."""

    hidden = Enum("Hidden", ["ONE"])
    pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"a": {"b": [1, Other()]}}, r"'a'\['b'\]\[1\]"),
        ({"f": print}, "'f'"),
        ({"e": [Local.hidden["ONE"]]}, r"'e'\[0\]"),
        ({"s": {1, Other()}}, "'s'"),
        ({"s": [frozenset([Backend.FLASH])]}, r"'s'\[0\]"),
        ({"t": {torch.ones(1)}}, "'t'"),
        ({"n": [Local.pair(1, 2)]}, r"'n'\[0\] would not come back.*Pair"),
        ({"n": Point(1, Other())}, r"'n'\['y'\]"),
        (slice(Other()), "stop of"),
        ({"m": torch.nn.Linear(1, 1)}, "'m'"),
        (argparse.Namespace(parser=Other()), "'parser'"),
    ],
)
def test_what_cannot_be_stored_is_named(value: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        pack(value)


def test_a_path_in_front_is_told() -> None:
    with pytest.raises(UsageError, match=r"'model'\['rng'\]\['f'\]"):
        pack({"f": print}, path=("model", "rng"))


def test_a_value_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UsageError, match="nested too deeply"):
        pack(endless)


@pytest.mark.parametrize(
    "packed",
    [
        None,
        {"value": 1},
        {"value": 1, "kinds": [], "more": 0},
        {"value": 1, "kinds": [((), "unknown")]},
        {"value": "os", "kinds": [((), "dtype")]},
        {"value": "no_such_dtype", "kinds": [((), "dtype")]},
        {"value": "x", "kinds": [((), "BytesIO")]},
        {"value": "x", "kinds": 5},
        {"value": {1: 2}, "kinds": [((), "Namespace")]},
        {"value": ["os"], "kinds": [((), "Enum")]},
        {"value": [[], 1, 2], "kinds": [((), "Enum")]},
        {"value": {"x": 1}, "kinds": [((), [])]},
        {"value": {"x": 1}, "kinds": [((), ["os"])]},
        {"value": {"x": 1}, "kinds": [((), [1, 2])]},
        {"value": 3, "kinds": [((), ["os", "path"])]},
    ],
)
def test_what_pack_does_not_make_is_corrupt(packed: Any) -> None:
    with pytest.raises(CorruptError, match="it is"):
        unpack(packed, owner="it")
