"""asyncckpt/format/body_members.py and module_facts.py: the member for modules, and what a reader refuses of it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.errors import CorruptError
from asyncckpt.format.body_members import encode_modules, must_be_known, with_modules
from asyncckpt.format.module_facts import facts_of, metadata_of_facts
from asyncckpt.format.strict_json import Fields, loads
from asyncckpt.format.tree import TENSOR, Node, decode_tree, encode_tree, mapping_node

NAMES = st.sampled_from(["", "a", "a.b", "a.b.c", "b", "x.y"])
LOCALS = st.one_of(
    st.fixed_dictionaries({"version": st.one_of(st.integers(0, 3), st.none(), st.booleans())}),
    st.dictionaries(st.sampled_from(["version", "scale"]), st.one_of(st.integers(), st.floats(allow_nan=False))),
)
KEYS = st.lists(st.sampled_from(["w", "a.w", "a.b.w", "a.b.c.w", "q.r.w"]), unique=True)


@given(st.dictionaries(NAMES, LOCALS), KEYS)
def test_metadata_come_back(metadata: dict[str, Any], keys: list[str]) -> None:
    facts = facts_of(metadata, keys, owner="test")
    found = metadata_of_facts(facts, keys, owner="test")
    assert repr(sorted(found.items())) == repr(sorted(metadata.items()))


@given(st.dictionaries(NAMES, LOCALS), KEYS)
def test_a_tree_comes_back_with_them(metadata: dict[str, Any], keys: list[str]) -> None:
    state = mapping_node("dict", keys, [TENSOR] * len(keys), metadata)
    tree: Node = ("dict", ("m", "l"), (("state", state), ("list", (TENSOR, mapping_node("ordered", (), (), metadata)))))
    text = encode_modules(tree)
    members = loads(b'{"tree":0' + text + b"}", owner="test")
    bare = decode_tree(encode_tree(tree), owner="test")
    assert with_modules(bare, Fields(members, owner="test", where="manifest")) == tree


@pytest.mark.parametrize(
    ("facts", "keys", "expected"),
    [
        ((), ["w"], False),
        ((("", 1),), [], False),
        ((("", 2),), ["num_batches_tracked"], False),
        ((("bn", 2), ("relu", 1)), ["bn.weight", "bn.num_batches_tracked"], False),
        ((("bn", 3),), ["bn.num_batches_tracked"], True),
        ((("a", 2),), ["a.weight"], True),
        ((("a", None),), ["a.weight"], True),
        ((("a", {"dict": []}),), [], True),
    ],
)
def test_a_reader_must_know_what_could_change_a_load(facts: Any, keys: list[str], expected: bool) -> None:
    assert must_be_known(("dict", ("m",), (("dict", tuple(keys), (TENSOR,) * len(keys), facts),))) is expected


@pytest.mark.parametrize(
    "modules",
    [
        {},
        [3],
        [{"path": ["m"]}],
        [{"path": "m", "facts": {}}],
        [{"path": [3], "facts": {}}],
        [{"path": ["x"], "facts": {}}],
        [{"path": ["t"], "facts": {}}],
        [{"path": ["m"], "facts": []}],
        [{"path": ["m"], "facts": {"a": "text"}}],
        [{"path": ["m"], "facts": {"a": True}}],
        [{"path": ["m"], "facts": {"a": {"unknown": 3}}}],
        [{"path": ["m"], "facts": {}}, {"path": ["m"], "facts": {}}],
    ],
)
def test_what_is_malformed_is_refused(modules: Any) -> None:
    tree: Node = ("dict", ("m", "t"), (("dict", (), ()), TENSOR))
    with pytest.raises(CorruptError):
        with_modules(tree, Fields({"modules": modules}, owner="test", where="manifest"))


def test_a_name_that_is_no_text_is_left_out() -> None:
    for name in ("\ud800", 3):
        metadata: Any = OrderedDict([(name, {"version": 2})])
        assert facts_of(metadata, [], owner="test") == (("", None),)
