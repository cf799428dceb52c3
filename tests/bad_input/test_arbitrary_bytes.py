"""Decoders get bytes and documents that nobody has thought of, and never raise anything but a CheckpointError."""

from __future__ import annotations

import json
from typing import Any

import pytest
from crafted import encode, sign
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.errors import CheckpointError, CorruptError
from asyncckpt.format.head import decode_head
from asyncckpt.format.manifest import decode_header, header_length
from asyncckpt.format.names import manifest_name, split_shard_path
from asyncckpt.format.read_manifest import decode_manifest
from asyncckpt.format.strict_json import dumps, loads
from asyncckpt.format.tree import decode_tree, encode_tree
from asyncckpt.format.values import decode_value, encode_value

OWNER = "file"
NUMBERS = (
    st.integers()
    | st.sampled_from([0, -1, 2**31, 2**63 - 1, 2**63, 2**64, 10**400])
    | st.floats(allow_nan=False, allow_infinity=False)
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=20,
)
OF_VALUES = ["int", "float", "complex", "bytes", "tuple", "dict", "ordered", "set", "frozenset", "slice", "range"]
OF_TORCH = ["dtype", "size", "device"]
TAGS = st.sampled_from([*OF_VALUES, *OF_TORCH, "d", "o", "l", "u", "s", "bool", "NoneType"])
TAGGED = st.recursive(
    JSON | st.sampled_from(["t", "a", "v"]),
    lambda inner: st.dictionaries(TAGS, inner, max_size=1) | st.lists(inner, max_size=3),
    max_leaves=12,
)


def only_our_errors(function: Any, *arguments: Any, **options: Any) -> Any:
    try:
        return function(*arguments, **options)
    except CheckpointError as error:
        return error


@settings(deadline=None)
@given(raw=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_strict_json_of_arbitrary_bytes(raw: bytes) -> None:
    only_our_errors(loads, raw, owner=OWNER)


@settings(deadline=None)
@given(raw=st.text(alphabet='[]{}",:\\u0dD8e-+.1truefalsnN \n', max_size=60).map(str.encode))
def test_strict_json_of_almost_json(raw: bytes) -> None:
    """What is taken can be written again, and then means the same."""
    value = only_our_errors(loads, raw, owner=OWNER)
    if not isinstance(value, CheckpointError):
        assert loads(dumps(value), owner=OWNER) == value == json.loads(raw)


@settings(deadline=None)
@given(value=JSON)
def test_strict_json_of_json(value: Any) -> None:
    assert loads(dumps(value), owner=OWNER) == value


@settings(deadline=None)
@given(prefix=st.binary(max_size=16), file_bytes=st.integers(0, 2**64))
def test_header_length_of_arbitrary_bytes(prefix: bytes, file_bytes: int) -> None:
    length = only_our_errors(header_length, prefix, file_bytes=file_bytes, owner=OWNER)
    assert isinstance(length, CorruptError) or 8 <= length <= file_bytes


ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "U8", "F7", ""]) | JSON,
        "shape": st.lists(NUMBERS, max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(0, 64), max_size=3) | JSON,
    },
)


@settings(deadline=None)
@given(
    header=st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), ENTRIES | JSON, max_size=3),
    size=st.integers(0, 200),
)
def test_header_of_arbitrary_entries(header: dict[str, Any], size: int) -> None:
    raw = bytes(8) + dumps(header)
    found = only_our_errors(decode_header, raw, file_bytes=len(raw) + size, owner=OWNER)
    if not isinstance(found, CheckpointError):
        assert sum(entry.bytes for entry in found.entries.values()) == size


@settings(deadline=None)
@given(raw=st.binary(max_size=100))
def test_header_of_arbitrary_bytes(raw: bytes) -> None:
    only_our_errors(decode_header, raw, file_bytes=len(raw), owner=OWNER)


@settings(deadline=None)
@given(text=st.binary(max_size=100))
@pytest.mark.parametrize("decode", [decode_manifest, decode_head])
def test_manifest_of_arbitrary_bytes(decode: Any, text: bytes) -> None:
    only_our_errors(decode, text, manifest_name(0))
    only_our_errors(decode, sign(text), manifest_name(0))


STEP = 7
TABLES = st.fixed_dictionaries(
    {"name": st.sampled_from(["", "t"]), "rows": st.integers(0, 4), "shard": st.just([0, 1])},
    optional={"whole": st.booleans(), "removed": st.integers(0, 2), "filters": st.lists(JSON, max_size=1)},
)
MEMBERS: dict[str, st.SearchStrategy[Any]] = {
    "format": st.just("asyncckpt"),
    "version": st.just(1),
    "requires": st.just(["compacted", "delta", "encoding", "pad"]),
    "writer": st.text(max_size=3),
    "created": st.text(max_size=3),
    "step": st.just(STEP),
    "kind": st.sampled_from(["full", "delta"]),
    "parents": st.just([]) | st.just([{"step": 3, "attempt": "1" * 32, "digest": "2" * 32}]),
    "attempt": st.just("0" * 32),
    "byteorder": st.just("little"),
    "digest_algorithm": st.just("xxh3-128/4MiB"),
    "ranks_count": st.just(1),
    "values": st.lists(TAGGED, max_size=2),
    "metadata": TAGGED,
    "tables": st.just([]) | st.lists(JSON | TABLES, max_size=2),
    "tree": TAGGED | st.just({"d": []}),
}
FILES = st.fixed_dictionaries(
    {
        "path": st.just(f"data/{STEP:012d}-{'0' * 32}/r00000-000.safetensors"),
        "rank": st.just(0),
        "bytes": st.integers(8, 40),
        "header_bytes": st.just(8),
        "header_digest": st.just("0" * 32),
    }
)
BLOCKS = st.fixed_dictionaries(
    {
        "name": st.text(max_size=2) | st.sampled_from(["t@c", "t@#removed", "#pad.0"]),
        "role": st.sampled_from(["dense", "id", "weight", "removed", "pad"]),
        "dtype": st.sampled_from(["uint8", "float32", "complex128", "float7"]),
        "shape": st.lists(st.integers(0, 4), max_size=2),
        "file": st.just(0),
        "offset": st.integers(8, 40),
        "bytes": st.integers(0, 32),
        "digest": st.just("0" * 32),
    },
    optional={
        "leaf": st.integers(0, 2),
        "key": st.text(max_size=2),
        "table": st.text(max_size=2) | st.just("t"),
        "column": st.text(max_size=2) | st.sampled_from(["c", "#removed"]),
        "row_begin": st.integers(0, 2),
        "whole_shape": st.lists(st.integers(0, 4), max_size=2),
        "encoding": st.lists(JSON | st.just({"kind": "zstd"}), max_size=2),
        "stored": JSON | st.just({"dtype": "U8", "shape": [4]}),
    },
)


@settings(deadline=None, max_examples=200)
@given(
    members=st.fixed_dictionaries(MEMBERS),
    files=st.lists(FILES, min_size=1, max_size=1),
    blocks=st.lists(BLOCKS, max_size=3),
    change=st.sampled_from([None, *MEMBERS]),
    nonsense=JSON,
)
def test_manifest_of_arbitrary_members(
    members: dict[str, Any], files: list[Any], blocks: list[Any], change: str | None, nonsense: Any
) -> None:
    document = {**members, "files": files, "blocks": blocks}
    if change is not None:
        document[change] = nonsense
    found = only_our_errors(decode_manifest, sign(encode(document)), manifest_name(STEP))
    if not isinstance(found, CheckpointError):
        assert sum(block.placed.spec.bytes for block in found.blocks) == found.bytes_total - 8


@settings(deadline=None)
@given(value=TAGGED)
def test_value_of_arbitrary_json(value: Any) -> None:
    found = only_our_errors(decode_value, value, owner=OWNER)
    if not isinstance(found, CheckpointError):
        encoded = encode_value(found, owner=OWNER)
        again = decode_value(encoded, owner=OWNER)
        assert type(again) is type(found)
        assert encode_value(again, owner=OWNER) == encoded  # A set may be shown in another order.


@settings(deadline=None)
@given(value=TAGGED)
def test_tree_of_arbitrary_json(value: Any) -> None:
    found = only_our_errors(decode_tree, value, owner=OWNER)
    if not isinstance(found, CheckpointError):
        assert repr(decode_tree(encode_tree(found), owner=OWNER)) == repr(found)


@settings(deadline=None)
@given(path=st.text(alphabet="data/0123456789abcdef-r.\\safetn\n\0", max_size=90))
def test_path_of_arbitrary_text(path: str) -> None:
    found = only_our_errors(split_shard_path, path, owner=OWNER)
    assert isinstance(found, CorruptError) or "/".join(("data", *found)) == path
