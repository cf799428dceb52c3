"""Digests of replicas, and what differs between those of ranks; tests/ranks shows that they are of the snapshot."""

from __future__ import annotations

import pytest

from asyncckpt.engine.ranks.replica_contents import check_contents, decode_contents
from asyncckpt.errors import ConflictError, CorruptError

pytestmark = pytest.mark.any_core


def test_replicas_that_are_the_same_where_they_are() -> None:
    check_contents(
        {0: {'["w"]': "a1", "table t": "b2"}, 1: {}, 2: {"table t": "b2", '["v"]': "c3"}, 3: {'["w"]': "a1"}}
    )


def test_what_differs_is_named() -> None:
    same = {'["w"]': "a1", "table t": "b2"}
    with pytest.raises(ConflictError, match=r"table 't' .*other values on ranks 0 and 2.*is a shard"):
        check_contents({0: same, 1: same, 2: {**same, "table t": "b3"}})
    with pytest.raises(ConflictError, match=r'tensor \["w"\] .*other values on ranks 1 and 2.*plain value.*buffers'):
        check_contents({0: {}, 1: same, 2: {**same, '["w"]': "a2"}})


def test_digests_travel() -> None:
    assert decode_contents(b'{"table t":"b2"}', rank=1) == {"table t": "b2"}


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"a":1}', b'{"a":null}', b"\xff"])
def test_nonsense_from_another_rank(raw: bytes) -> None:
    with pytest.raises(CorruptError, match="rank 1"):
        decode_contents(raw, rank=1)
