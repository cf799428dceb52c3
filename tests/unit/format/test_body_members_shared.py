"""Shared leaves in a manifest: what is written is read, and what cannot be is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import xxhash

from asyncckpt.errors import CorruptError
from asyncckpt.format.body_members import decode_sharing, encode_sharing, features_of_sharing
from asyncckpt.format.names import manifest_name
from asyncckpt.format.read_manifest import decode_manifest
from asyncckpt.format.strict_json import Fields
from asyncckpt.format.tree import TENSOR
from asyncckpt.format.write_manifest import encode_manifest, render_body
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.sharing import NOTHING_SHARED, SharedMemory, SharedView, Sharing, TiedLeaf
from asyncckpt.model.table import Role
from tests.unit.format.test_manifest import STEP, head_of, placed

TIED = Sharing(tied=(TiedLeaf("b", 1, 0),))
VIEWS = Sharing(memories=(SharedMemory(64, (SharedView(0, 0, (4, 1)), SharedView(2, 16, ()))),))
BOTH = Sharing(TIED.tied, VIEWS.memories)


def dense(name: str, leaf: int | None) -> BlockSpec:
    return BlockSpec(name, Role.DENSE, "float32", "F32", 4, shape=(3,), stored_shape=(3,), leaf=leaf)


def fields(text: bytes) -> Fields:
    return Fields(json.loads(b'{"": 0' + text + b"}"), owner="test", where="part")


@pytest.mark.parametrize("sharing", [NOTHING_SHARED, TIED, VIEWS, BOTH])
def test_what_is_written_is_read(sharing: Sharing) -> None:
    assert decode_sharing(fields(encode_sharing(sharing)), leaves_count=3) == sharing
    assert features_of_sharing(sharing) == ({"tied"} if sharing.tied else set())


def test_nothing_is_written_where_nothing_is_shared() -> None:
    assert encode_sharing(NOTHING_SHARED) == b""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tied": [{"name": "b", "leaf": 3, "of": 0}]}, "leaf must be"),
        ({"tied": [{"name": "b", "leaf": 1, "of": 3}]}, "of must be"),
        ({"tied": [{"name": 7, "leaf": 1, "of": 0}]}, "name must be"),
        ({"tied": [{"name": "b", "leaf": 1, "of": 1}]}, "a leaf twice"),
        ({"tied": [{"name": "b", "leaf": 1, "of": 0}, {"name": "c", "leaf": 2, "of": 1}]}, "a leaf twice"),
        ({"tied": [{"name": "b", "leaf": 1, "of": 0}, {"name": "c", "leaf": 1, "of": 0}]}, "a leaf twice"),
        ({"tied": [{"name": "c", "leaf": 2, "of": 0}]}, "a leaf twice"),
        ({"shared": [{"bytes": -1, "views": []}]}, "bytes must be"),
        ({"shared": [{"bytes": 8, "views": [{"leaf": 3, "offset": 0, "strides": []}]}]}, "leaf must be"),
        ({"shared": [{"bytes": 8, "views": [{"leaf": 0, "offset": -1, "strides": []}]}]}, "offset must be"),
        ({"shared": [{"bytes": 8, "views": [{"leaf": 0, "offset": 0, "strides": [-1]}]}]}, "strides must be"),
        ({"shared": {}}, "shared must be"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    sound = json.loads(b"{" + encode_sharing(VIEWS)[1:] + b"}")
    with pytest.raises(CorruptError, match=message):
        decode_sharing(Fields({**sound, **changes}, owner="test", where="part"), leaves_count=3)


@pytest.mark.parametrize(("leaf", "name"), [(1, "b"), (None, "b"), (1, "c")])
def test_a_tied_tensor_with_blocks_is_refused(leaf: int | None, name: str) -> None:
    specs = [dense("a", leaf=0), dense(name, leaf=leaf)]
    blocks, total = placed(specs)
    tree = ("dict", ("a", "b"), (TENSOR, TENSOR))
    digests = np.zeros((2, 16), dtype=np.uint8)
    raw = bytes(encode_manifest(head_of(total), render_body((), tree, blocks, sharing=TIED), digests))
    with pytest.raises(CorruptError, match="tied tensor 'b' has a block of its own"):
        decode_manifest(raw, manifest_name(STEP))
    alone, total = placed(specs[:1])
    raw = bytes(encode_manifest(head_of(total), render_body((), tree, alone, sharing=TIED), digests[:1]))
    assert decode_manifest(raw, manifest_name(STEP)).parts[0].sharing == TIED
    assert b'"requires":["tied"]' in raw
    unnamed = raw.replace(b'"requires":["tied"]', b'"requires":[]')
    text = unnamed[: unnamed.rindex(b',"digest"')]
    signed = text + b',"digest":"' + xxhash.xxh3_128_hexdigest(text).encode() + b'"}\n'
    with pytest.raises(CorruptError, match=r"does not require.*tied"):
        decode_manifest(signed, manifest_name(STEP))
