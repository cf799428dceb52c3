"""Digests of replicas, and what differs between those of ranks; tests/ranks shows that they are of the snapshot."""

from __future__ import annotations

import pytest

from asyncckpt.engine.ranks.replica_contents import Contents, check_contents, decode_contents
from asyncckpt.errors import ConflictError, CorruptError

pytestmark = pytest.mark.any_core


SAME = {'["w"]': "a1", "table t": "b2"}


def test_replicas_that_are_the_same_where_they_are() -> None:
    others = [{}, {"table t": "b2", '["v"]': "c3"}, {'["w"]': "a1"}]
    check_contents({rank: Contents(digests) for rank, digests in enumerate([SAME, *others])})


def test_what_differs_is_named() -> None:
    same = Contents(SAME)
    with pytest.raises(ConflictError, match=r"table 't' .*different rows on ranks 0 and 2.*is a shard"):
        check_contents({0: same, 1: same, 2: Contents({**SAME, "table t": "b3"})})
    with pytest.raises(ConflictError, match=r"^tensor 'w' .*values on ranks 1 and 2.*plain value.*buffers"):
        check_contents({0: Contents({}), 1: same, 2: Contents({**SAME, '["w"]': "a2"})})


def test_an_id_on_two_ranks_is_named() -> None:
    check_contents({0: Contents({}, {"t": [1, 2], "u": [3]}), 1: Contents({}, {"t": [3], "u": [1]})})
    with pytest.raises(ConflictError, match=r"table 't': ranks 0 and 2 hold the same ids, found -7.*`owned`"):
        check_contents({0: Contents({}, {"t": [1, -7]}), 1: Contents({}), 2: Contents({}, {"t": [-7]})})


def test_ids_that_must_differ_have_another_name_on_each_rank() -> None:
    """Equal names are not compared any further."""
    assert Contents(SAME, {"t": []}).name(0) == Contents(SAME, {"t": []}).name(1)
    assert Contents(SAME, {"t": [1]}).name(0) != Contents(SAME, {"t": [1]}).name(1)


def test_contents_travel() -> None:
    contents = Contents(SAME, {"t": [1, -(2**63)]})
    assert decode_contents(contents.encoded(), rank=1) == contents


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"[]", b"{}", b"\xff", b'{"digests":{}}', b'{"digests":{"a":1},"ids":{}}'),
        *(b'{"digests":{},"ids":{"t":1}}', b'{"digests":{},"ids":{"t":[true]}}'),
    ],
)
def test_nonsense_from_another_rank(raw: bytes) -> None:
    with pytest.raises(CorruptError, match="rank 1"):
        decode_contents(raw, rank=1)
