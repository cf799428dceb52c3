"""Names of the classes of objects in a manifest: what is written is read, and what does not fit the tree is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import xxhash

from asyncckpt.errors import CorruptError
from asyncckpt.format.names import manifest_name
from asyncckpt.format.read_manifest import decode_manifest
from asyncckpt.format.tree import object_paths
from asyncckpt.format.write_manifest import encode_manifest, render_body
from tests.unit.format.test_manifest import STEP, head_of, placed

EMPTY = ("dict", (), ())
INNER = ("dict", ("in",), (("state", EMPTY),))
TREE = ("dict", ("a", "b"), (("state", INNER), ("list", (("state", EMPTY),))))
CLASSES = (("MyAdam", "Adam"), (), ("StepLR",))


def written(**changes: Any) -> bytes:
    blocks, total = placed([])
    body = render_body((), TREE, blocks, classes=CLASSES)
    raw = bytes(encode_manifest(head_of(total), body, np.empty((0, 16), dtype=np.uint8)))
    if changes:
        document = {**json.loads(raw), **changes}
        del document["digest"]
        text = json.dumps(document, separators=(",", ":")).encode()[:-1]
        raw = text + b',"digest":"' + xxhash.xxh3_128_hexdigest(text).encode() + b'"}\n'
    return raw


def test_classes_are_read_in_the_order_of_the_objects_of_the_tree() -> None:
    (part,) = decode_manifest(written(), manifest_name(STEP)).parts
    assert part.classes == CLASSES
    assert list(object_paths(part.tree)) == [("a",), ("a", "in"), ("b", ("int", 0))]


@pytest.mark.parametrize("wrong", [7, [], [["a"], []], [["a"], [], "b"], [["a"], [], [3]]])
def test_classes_that_do_not_fit_the_tree_are_refused(wrong: Any) -> None:
    with pytest.raises(CorruptError, match="classes must be"):
        decode_manifest(written(classes=wrong), manifest_name(STEP))


def test_a_checkpoint_without_optimizers_says_nothing_of_classes() -> None:
    assert render_body((), TREE, [], classes=((), (), ())).text == render_body((), TREE, []).text
