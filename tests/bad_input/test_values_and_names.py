"""Cases 46 to 50: what users put into metadata, keys, names and shapes comes back exactly, or is refused."""

from __future__ import annotations

import datetime
import enum
import itertools
import math
import struct
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncckpt
from asyncckpt.format.head import FileFacts, ManifestHead
from asyncckpt.format.limits import VALUE_DEPTH_MAX
from asyncckpt.format.names import Attempt, manifest_name, shard_path
from asyncckpt.format.read_manifest import decode_manifest
from asyncckpt.format.tree import TENSOR
from asyncckpt.format.write_manifest import encode_manifest, render_body
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.table import Role
from asyncckpt.native import row_begins
from asyncckpt.plan.image import plan_image, split_rows
from tests.worlds.objects import Stateful
from tests.worlds.saves import save_one

UsageError = asyncckpt.UsageError


def save(root: Path, tensors: dict[str, Any], **options: Any) -> None:
    with asyncckpt.Saver(path=root, tensors=tensors, durability="none") as saver:
        saver.save(0, **options)


def metadata_after_a_round_trip(root: Path, metadata: Any) -> Any:
    save(root, {"n": 1}, metadata=metadata)
    return asyncckpt.Loader(root).load().metadata


class ColourText(str, enum.Enum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


# -- 46: what is not plain ---------------------------------------------------------------------------------------------

NOT_PLAIN = {
    "ndarray": np.zeros(2),
    "numpy scalar": np.float64(0.5),
    "tensor": torch.zeros(2),
    "datetime": datetime.datetime(2024, 1, 1),
    "function": len,
    "lambda": lambda: 0,
    "class": int,
    "object": object(),
    "bytearray": bytearray(b"x"),
    "int enum": Number.ONE,
    "generator": iter([1]),
    "path": Path("x"),
    "memoryview": memoryview(b"x"),
    "layout": torch.strided,
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_case_046_metadata_that_is_not_plain(tmp_path: Path, kind: str) -> None:
    with asyncckpt.Saver(path=tmp_path) as saver:
        with pytest.raises(UsageError) as caught:
            saver.save_async(0, metadata={"run": {"tags": [1, NOT_PLAIN[kind]]}})
        assert "metadata['run']['tags'][1]" in str(caught.value)
        assert type(NOT_PLAIN[kind]).__name__ in str(caught.value)
        assert "asyncckpt never pickles" in str(caught.value)
        assert ("x.item()" if kind == "tensor" else "turn it into a number, text") in str(caught.value)
    assert asyncckpt.list_steps(tmp_path) == []


@pytest.mark.parametrize("kind", [kind for kind in NOT_PLAIN if kind not in ("ndarray", "numpy scalar", "tensor")])
def test_case_046_state_that_is_not_plain(tmp_path: Path, kind: str) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors={"run": {"tags": [1, NOT_PLAIN[kind]]}}) as saver:
        with pytest.raises(UsageError) as caught:
            saver.save_async(0)
        assert "'run'['tags'][1]" in str(caught.value)
    assert asyncckpt.list_steps(tmp_path) == []


@pytest.mark.parametrize("metadata", [[], "x", 5, {1: 2}, {None: 1}, {("a",): 1}])
def test_case_046_metadata_that_is_no_mapping_of_names(tmp_path: Path, metadata: Any) -> None:
    with asyncckpt.Saver(path=tmp_path) as saver, pytest.raises(UsageError, match="metadata is not a mapping"):
        saver.save_async(0, metadata=metadata)


def test_case_046_metadata_that_contains_itself(tmp_path: Path) -> None:
    endless: dict[str, Any] = {}
    endless["again"] = [endless]
    with asyncckpt.Saver(path=tmp_path) as saver:
        with pytest.raises(UsageError, match=r"nested too deeply .or contains itself"):
            saver.save_async(0, metadata=endless)
        with pytest.raises(UsageError, match="contains itself"):
            asyncckpt.Saver(path=tmp_path, tensors=endless).save_async(0)


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: {"k": v}, lambda v: (v,)])
def test_case_046_deepest_metadata_that_is_taken_can_be_read(tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    value: Any = 0.5
    for _ in range(VALUE_DEPTH_MAX):
        value = wrap(value)
    assert metadata_after_a_round_trip(tmp_path, {"m": value}) == {"m": value}
    with asyncckpt.Saver(path=tmp_path) as saver, pytest.raises(UsageError, match="nested too deeply"):
        saver.save_async(1, metadata={"m": wrap(value)})


def test_case_046_text_that_is_not_unicode(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors={"a": {"b": "\ud800"}}) as saver:
        with pytest.raises(UsageError, match=r"'a'.'b'. is not valid Unicode"):
            saver.save_async(0)
        with pytest.raises(UsageError, match=r"metadata.'x'. is not valid Unicode"):
            saver.save_async(0, metadata={"x": "\udfff"})


def test_case_046_str_enum_is_its_text(tmp_path: Path) -> None:
    save(tmp_path, {"colour": ColourText.RED, ColourText.RED: torch.ones(1)}, metadata={"colour": ColourText.RED})
    target = {"colour": "", "red": torch.zeros(1)}
    report = asyncckpt.Loader(tmp_path, tensors=target).load()
    assert (report.values, report.metadata) == ({"colour": "red"}, {"colour": "red"})
    assert target["red"] == torch.ones(1)


# -- 47: keys ----------------------------------------------------------------------------------------------------------


def test_case_047_keys_of_any_type_are_kept_apart(tmp_path: Path) -> None:
    keys: list[Any] = [1, "1", 2.0, "2.0", 2.5, None, "None", False, "False", "", ".", "a.b", -1, 2**70]
    state = {"deep": {key: torch.tensor([index]) for index, key in enumerate(keys)}}
    state["deep"]["a"] = {"b": torch.tensor([99])}
    save(tmp_path, state)
    target = {"deep": {key: torch.zeros(1, dtype=torch.int64) for key in keys}}
    target["deep"]["a"] = {"b": torch.zeros(1, dtype=torch.int64)}
    asyncckpt.Loader(tmp_path, tensors=target).load()
    assert [int(target["deep"][key]) for key in keys] == list(range(len(keys)))
    assert int(target["deep"]["a"]["b"]) == 99


def test_case_047_values_under_like_names_are_all_reported(tmp_path: Path) -> None:
    save(tmp_path, {"d": {1: "int", "1": "text"}, "d.1": "dotted"})
    values = asyncckpt.Loader(tmp_path).load().values
    assert values == {"d.1": "int", "d.1#2": "text", "d.1#3": "dotted"}


@pytest.mark.parametrize("key", [("a",), b"a", 1j, frozenset(), torch.float32, Number.ONE])
def test_case_047_key_of_another_type(tmp_path: Path, key: Any) -> None:
    match = "'d' has a key of a type that cannot be stored"
    with asyncckpt.Saver(path=tmp_path, tensors={"d": {key: 1}}) as saver, pytest.raises(UsageError, match=match):
        saver.save_async(0)


# -- 48: names ---------------------------------------------------------------------------------------------------------

NAMES = [
    "",
    ".",
    "..",
    "/",
    "a/b",
    "../../etc/passwd",
    "\\",
    "a\\b",
    "C:",
    "\x00",
    "a\x00b",
    "a\nb",
    "\u2028",
    "\x7f",
    '"',
    "😀",
    "é",  # one character
    "e\u0301",  # the same letter in two
    "A",
    "a",
    "CON",
    "con.",
    "trailing dot.",
    " ",
    "n" * 10_000,
    "__metadata__",
    "{}",
    "%s",
    "t",
    "t@embedding",
    "t@id",
    "a#2",
    "a[0:1]",
]


def test_case_048_any_name_of_a_tensor(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("t", 1)
    table.insert(torch.tensor([5]), torch.tensor([[0.5]]))
    state = {name: torch.tensor([index]) for index, name in enumerate(NAMES)}
    save_one(tmp_path, 0, tensors=state, hashtables={"t": table})
    files = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert files == ["000000000000.json", "LOCK", "r00000-000.safetensors"]
    target = {name: torch.tensor([-1]) for name in NAMES}
    other = asyncckpt.HashTable("t", 1)
    asyncckpt.Loader(tmp_path, {"t": other}, target).load()
    assert [int(target[name]) for name in NAMES] == list(range(len(NAMES)))
    assert other.ids().tolist() == [5]
    (shard,) = tmp_path.glob("data/*/*")
    with safetensors.safe_open(str(shard), "pt") as opened:
        assert len(opened.keys()) == len(NAMES) + 2


@pytest.mark.parametrize("name", [name for name in NAMES if "@" not in name])
def test_case_048_any_name_of_a_table(tmp_path: Path, name: str) -> None:
    table, other = asyncckpt.HashTable("t", 1), asyncckpt.HashTable("t", 1)
    table.insert(torch.tensor([5]), torch.tensor([[0.5]]))
    save_one(tmp_path, 0, hashtables={name: table}, durability="none")
    asyncckpt.Loader(tmp_path, {name: other}).load()
    assert other.ids().tolist() == [5]


@pytest.mark.parametrize("name", ["a@b", "@", 5, None])
def test_case_048_name_of_a_table_that_cannot_be(tmp_path: Path, name: Any) -> None:
    with pytest.raises(UsageError, match="str without '@'"):
        asyncckpt.Saver(path=tmp_path, hashtables={name: asyncckpt.HashTable("t", 1)})
    asyncckpt.Saver(path=tmp_path).close()  # A refused one leaves no lock.


def test_case_048_name_that_is_not_unicode(tmp_path: Path) -> None:
    match = "name is not valid Unicode"
    state = {"a": {"\ud800": torch.ones(1)}}
    with asyncckpt.Saver(path=tmp_path, tensors=state) as saver, pytest.raises(UsageError, match=match):
        saver.save_async(0)
    table = asyncckpt.HashTable("t", 1)
    tables = {"\udc80": table}
    with asyncckpt.Saver(path=tmp_path, hashtables=tables) as saver, pytest.raises(UsageError, match=match):
        saver.save_async(0)
    assert table.lookup(torch.tensor([1])).tolist() == [0], "a refused save gives its tables back"


# -- 49: numbers -------------------------------------------------------------------------------------------------------


def bits_of(value: float) -> bytes:
    return struct.pack("<d", value)


@pytest.mark.parametrize(
    "value", [0.1, -0.0, 0.0, math.inf, -math.inf, 5e-324, 1.7976931348623157e308, 1 / 3, 2**53 + 0.0, 1e22]
)
def test_case_049_float_in_metadata_is_exact(tmp_path: Path, value: float) -> None:
    back = metadata_after_a_round_trip(tmp_path, {"x": value, "z": complex(value, -value)})
    assert bits_of(back["x"]) == bits_of(value)
    assert bits_of(back["z"].real) + bits_of(back["z"].imag) == bits_of(value) + bits_of(-value)


def test_case_049_nan_in_metadata(tmp_path: Path) -> None:
    assert math.isnan(metadata_after_a_round_trip(tmp_path, {"x": math.nan})["x"])


@pytest.mark.parametrize("value", [2**53, 2**53 + 1, -(2**53) - 1, 2**63, 2**64, -(2**200), 10**3000])
def test_case_049_integer_in_metadata_is_exact(tmp_path: Path, value: int) -> None:
    assert metadata_after_a_round_trip(tmp_path, {"x": value}) == {"x": value}


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=15,
)


@settings(max_examples=60, deadline=None)
@given(metadata=st.dictionaries(st.text(), PLAIN, max_size=5))
def test_any_plain_metadata_comes_back(tmp_path_factory: pytest.TempPathFactory, metadata: dict[str, Any]) -> None:
    back = metadata_after_a_round_trip(tmp_path_factory.mktemp("metadata"), metadata)
    assert repr(back) == repr(metadata)  # Of equal types and signs, not only equal.


KEYS = st.text(max_size=8) | st.integers(-(2**70), 2**70) | st.booleans() | st.none() | st.floats(allow_nan=False)
LEAVES = st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.none() | st.just("tensor")
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def with_tensors(tree: Any, counter: list[int]) -> Any:
    """The tree with a tensor of its own in place of every "tensor"."""
    if isinstance(tree, dict):
        return {key: with_tensors(child, counter) for key, child in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(with_tensors(child, counter) for child in tree)
    if tree == "tensor":
        counter.append(len(counter))
        return torch.full((len(counter) % 3,), len(counter), dtype=torch.int32)
    return tree


@settings(max_examples=60, deadline=None)
@given(tree=st.dictionaries(st.text(max_size=8), TREES, max_size=4))
def test_any_nested_state_comes_back(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]) -> None:
    root = tmp_path_factory.mktemp("tree")
    state = with_tensors(tree, [])
    save(root, {"held": Stateful(state)})
    holder = Stateful({})
    asyncckpt.Loader(root, tensors={"held": holder}).load()
    assert repr(holder.state) == repr(state)


def test_case_094_containers_come_back_as_their_plain_kind(tmp_path: Path) -> None:
    """A named tuple comes back as a tuple: no class is looked up by name."""
    point, words = namedtuple("point", "x y"), type("Words", (dict,), {})
    save(tmp_path, {"held": Stateful({"point": point(1, torch.ones(1)), "counted": words(a=2, b=1)})})
    holder = Stateful({})
    asyncckpt.Loader(tmp_path, tensors={"held": holder}).load()
    assert type(holder.state["point"]) is tuple
    assert holder.state["point"][0] == 1
    assert type(holder.state["counted"]) is dict
    assert holder.state["counted"] == {"a": 2, "b": 1}


# -- 50: sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (5, 0, 2), (1,), (0,) * 64, (1,) * 64])
@pytest.mark.parametrize("staged", [False, True])
def test_case_050_small_shapes(tmp_path: Path, shape: tuple[int, ...], staged: bool) -> None:
    source, target = torch.ones(shape), torch.zeros(shape)
    with asyncckpt.Saver(path=tmp_path, tensors={"x": source}) as saver:
        saver.save_async(0).result() if staged else saver.save(0)
    asyncckpt.Loader(tmp_path, tensors={"x": target}).load()
    assert torch.equal(source, target)


def test_case_050_tensor_beyond_32_bits_of_elements_and_bytes() -> None:
    """Its plan and its manifest, for 12 GiB of data are too much for a test."""
    spec = BlockSpec(
        name="huge",
        role=Role.DENSE,
        dtype="float32",
        stored_dtype="F32",
        stored_itemsize=4,
        shape=(2**31 + 5, 1),
        stored_shape=(2**31 + 5, 1),
        leaf=0,
    )
    image = plan_image(split_rows(spec), parallel=8, rank=0)
    assert sum(block.spec.bytes for block in image.blocks) == spec.bytes > 2**32
    attempt = Attempt.new(0)
    files = tuple(
        FileFacts(
            path=shard_path(attempt, f.name),
            rank=0,
            bytes=f.bytes,
            header_bytes=len(f.header.text),
            header_digest=bytes(16),
        )
        for f in image.files
    )
    head = ManifestHead(
        step=0,
        kind="full",
        parents=(),
        attempt=attempt.id,
        created="",
        writer="",
        ranks_count=1,
        files=files,
        values=(),
        metadata={},
    )
    body = render_body((), ("dict", ("huge",), (TENSOR,)), image.blocks)
    begins = row_begins(image.lengths)
    digests = np.zeros((begins[-1], 16), dtype=np.uint8)
    for begin, end in itertools.pairwise(begins):
        digests[begin] = np.frombuffer(xxhash.xxh3_128_digest(digests[begin + 1 : end].tobytes()), dtype=np.uint8)
    raw = bytes(encode_manifest(head, body, digests))
    manifest = decode_manifest(raw, manifest_name(0))
    assert [block.placed for block in manifest.blocks] == list(image.blocks)
