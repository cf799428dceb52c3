"""Who writes which replica: everything once, balanced, the same answer on every rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.engine.replicas import (
    Replica,
    ReplicaList,
    Replicas,
    check_balanced,
    decode_list,
    decode_owners,
    different_owners,
    encode_owners,
    same_owners,
)
from asyncckpt.errors import ConflictError, CorruptError
from asyncckpt.model.sharded import sharded
from asyncckpt.plan.state import flatten

pytestmark = pytest.mark.once

SIZES = st.lists(st.integers(0, 1000), max_size=30)


def replica(number: int, size: int) -> Replica:
    return Replica(leaf=number, path=f'["w{number}"]', bytes=size, form=f"torch.uint8 [{size}]")


@given(SIZES, st.integers(1, 7))
def test_shares_are_balanced(sizes: list[int], ranks_count: int) -> None:
    listed = ReplicaList(tuple(replica(number, size) for number, size in enumerate(sizes)), "d")
    owners = same_owners(listed, ranks_count)
    assert owners.keys() == {item.path for item in listed.items}
    loads = [sum(item.bytes for item in listed.items if owners[item.path] == rank) for rank in range(ranks_count)]
    assert max(loads) - min(loads) <= max(sizes, default=0)


@given(st.lists(st.lists(st.integers(0, 20), unique=True, max_size=15), min_size=1, max_size=5))
def test_different_ranks_write_what_they_have(numbers: list[list[int]]) -> None:
    held = [[replica(number, 10 * number) for number in mine] for mine in numbers]
    owners = different_owners(held)
    assert owners.keys() == {item.path for items in held for item in items}
    for path, rank in owners.items():
        assert path in {item.path for item in held[rank]}


def test_every_leaf_is_written_by_one_rank() -> None:
    state = {f"w{number}": torch.zeros(number + 1) for number in range(9)} | {
        "box": sharded(torch.zeros(2), (0,), (4,))
    }
    left_to_others = []
    for rank in range(3):
        replicas = Replicas(rank, 3)
        listed = replicas.list_of(flatten(state))
        assert replicas.elsewhere(listed) is None
        replicas.agree(listed)
        elsewhere = replicas.elsewhere(listed)
        assert elsewhere is not None
        assert 9 not in elsewhere, "a leaf that is spread is nobody's replica"
        left_to_others.append(elsewhere)
    for leaf in range(9):
        assert sum(leaf not in elsewhere for elsewhere in left_to_others) == 1


def test_another_shape_has_to_be_agreed_upon_anew() -> None:
    replicas = Replicas(0, 2)
    listed = replicas.list_of(flatten({"w": torch.zeros(3)}))
    replicas.agree(listed)
    assert replicas.elsewhere(replicas.list_of(flatten({"w": torch.ones(3)}))) is not None
    assert replicas.elsewhere(replicas.list_of(flatten({"w": torch.zeros(4)}))) is None
    assert replicas.elsewhere(replicas.list_of(flatten({"w": torch.zeros(3, dtype=torch.int32)}))) is None
    assert replicas.elsewhere(replicas.list_of(flatten({"v": torch.zeros(3)}))) is None


def test_a_failed_save_makes_all_ask_again() -> None:
    replicas = Replicas(0, 2)
    listed = replicas.list_of(flatten({"w": torch.zeros(3)}))
    replicas.agree(listed)
    replicas.forget()
    assert replicas.elsewhere(listed) is None


def test_the_same_name_with_another_shape_is_a_conflict() -> None:
    other = Replica(leaf=0, path='["w1"]', bytes=3, form="torch.uint8 [3]")
    with pytest.raises(ConflictError, match=r"w1.*ranks 0 and 2.*Sharded"):
        different_owners([[replica(1, 10)], [], [other]])


@pytest.mark.parametrize(
    ("told", "is_same"),
    [
        ({0: ("a", False), 1: ("a", False)}, True),
        ({0: ("a", False), 1: ("b", False)}, False),
        ({0: ("a", True), 1: ("a", True)}, True),
    ],
)
def test_ranks_that_captured_alike(told: dict[int, tuple[str, bool]], is_same: bool) -> None:
    assert check_balanced(told) is is_same


@pytest.mark.parametrize("told", [{0: ("a", True), 1: ("a", False)}, {0: ("a", True), 1: ("b", True)}])
def test_what_nobody_has_captured_is_a_conflict(told: dict[int, tuple[str, bool]]) -> None:
    with pytest.raises(ConflictError, match=r"on ranks .* only"):
        check_balanced(told)


def test_lists_travel() -> None:
    items = (replica(0, 4), replica(1, 0))
    assert tuple(decode_list(ReplicaList(items, "d").encoded(), rank=1)) == items
    assert decode_owners(encode_owners({"a": 3})) == {"a": 3}


@pytest.mark.parametrize("raw", [b"", b"{}", b"[1]", b'[[0,"a",1]]', b'[[0,"a",1,2]]', b'[[true,"a",1,"f"]]', b"\xff"])
def test_nonsense_from_another_rank(raw: bytes) -> None:
    with pytest.raises(CorruptError):
        decode_list(raw, rank=1)


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"a":"b"}', b'{"a":true}'])
def test_nonsense_from_the_coordinator(raw: bytes) -> None:
    with pytest.raises(CorruptError):
        decode_owners(raw)


def test_a_path_that_nobody_was_told_to_write() -> None:
    replicas = Replicas(0, 2)
    listed = replicas.list_of(flatten({"w": torch.zeros(3)}))
    with pytest.raises(CorruptError, match="no rank was named"):
        replicas.not_mine(listed, {})
