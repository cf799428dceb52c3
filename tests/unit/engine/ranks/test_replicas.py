"""Who writes which replica: everything once, balanced, the same answer on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.engine.ranks.holdings import TableSlice
from asyncckpt.engine.ranks.replicas import (
    Replica,
    ReplicaList,
    Replicas,
    WrittenByPeers,
    decode_list,
    decode_owners,
)
from asyncckpt.engine.ranks.writers import different_owners, same_owners
from asyncckpt.errors import ConflictError, CorruptError
from asyncckpt.format.strict_json import dumps
from asyncckpt.model.sharded import Piece, Sharded, sharded
from asyncckpt.plan.state import flatten
from asyncckpt.tables import HashTable

pytestmark = pytest.mark.any_core

SIZES = st.lists(st.integers(0, 1000), max_size=30)


def replica(number: int, size: int) -> Replica:
    return Replica(path=f'["w{number}"]', bytes=size, form=f"torch.uint8 [{size}]", leaf=number)


@given(SIZES, st.integers(1, 7))
def test_shares_are_balanced(sizes: list[int], ranks_count: int) -> None:
    listed = ReplicaList(tuple(replica(number, size) for number, size in enumerate(sizes)))
    owners = same_owners(listed.items, ranks_count)
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


def test_everything_is_written_by_one_rank() -> None:
    state = {f"w{number}": torch.zeros(number + 1) for number in range(9)} | {
        "box": sharded(torch.zeros(2), (0,), (4,))
    }
    everywhere: list[WrittenByPeers] = []
    for rank in range(3):
        tables = {"whole": HashTable("whole", 4, replicated=True), "spread": HashTable("spread", 4, shard=(rank, 3))}
        replicas = Replicas(rank, 3)
        listed = replicas.list_of(flatten(state), tables)
        assert replicas.by_peers(listed) is None
        assert dict(listed.slices) == {"spread": TableSlice(3, rank, rank + 1)}
        replicas.agree(listed, replicas.written_by_peers(listed, same_owners(listed.items, 3), "a"))
        by_peers = replicas.by_peers(listed)
        assert by_peers is not None
        assert 9 not in by_peers.leaves, "a leaf that is spread is nobody's replica"
        everywhere.append(by_peers)
    for leaf in range(9):
        assert sum(leaf not in by_peers.leaves for by_peers in everywhere) == 1
    assert sum("whole" not in by_peers.tables for by_peers in everywhere) == 1
    assert all("spread" not in by_peers.tables for by_peers in everywhere)


@pytest.mark.parametrize(
    "changed",
    [
        {"w": torch.zeros(4)},
        {"w": torch.zeros(3, dtype=torch.int32)},
        {"v": torch.zeros(3)},
        {"w": 1, "v": torch.zeros(3)},
    ],
)
def test_another_form_has_to_be_agreed_upon_anew(changed: dict[str, Any]) -> None:
    replicas = Replicas(0, 2)
    listed = replicas.list_of(flatten({"w": torch.zeros(3)}), {})
    replicas.agree(listed, WrittenByPeers(leaves=frozenset([0])))
    assert replicas.by_peers(replicas.list_of(flatten({"w": torch.ones(3)}), {})) is not None
    assert replicas.by_peers(replicas.list_of(flatten(changed), {})) is None


def test_another_part_of_a_table_has_to_be_agreed_upon_anew() -> None:
    replicas, flat = Replicas(0, 2), flatten({})
    listed = replicas.list_of(flat, {"t": HashTable("t", 4, shard=(0, 2))})
    replicas.agree(listed, WrittenByPeers())
    assert replicas.by_peers(replicas.list_of(flat, {"t": HashTable("t", 4, shard=(0, 2))})) is not None
    assert replicas.by_peers(replicas.list_of(flat, {"t": HashTable("t", 4, shard=(1, 2))})) is None


def test_a_failed_save_makes_all_ask_again() -> None:
    replicas = Replicas(0, 2)
    listed = replicas.list_of(flatten({"w": torch.zeros(3)}), {})
    replicas.agree(listed, WrittenByPeers())
    replicas.forget()
    assert replicas.by_peers(listed) is None


def test_the_same_name_with_another_shape_is_a_conflict() -> None:
    other = Replica(path='["w1"]', bytes=3, form="torch.uint8 [3]")
    with pytest.raises(ConflictError, match=r"w1.*ranks 0 and 2.*Sharded"):
        different_owners([[replica(1, 10)], [], [other]])


def test_buffers_are_those_of_the_first_rank() -> None:
    """Between two forward passes they differ from rank to rank; DistributedDataParallel takes those of rank 0."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.BatchNorm1d(4096))
    flat = flatten({"first": torch.zeros(2000), "nested": [{"model": model}], "last": torch.zeros(2000)})
    listed = Replicas(0, 4).list_of(flat, {})
    by_first = {item.path for item in listed.items if item.by_first}
    names = ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert by_first == {f'["nested", ["int", 0], "model", "{name}"]' for name in names}
    for owners in (same_owners(listed.items, 4), different_owners([listed.items] * 4)):
        assert {owners[path] for path in by_first} == {0}
        assert set(owners.values()) == {0, 1, 2, 3}
    assert different_owners([[], list(listed.items), list(listed.items)])[next(iter(by_first))] == 1


def test_boxes_that_other_ranks_may_hold_too() -> None:
    def listed(begin: int, spread_over: int | None, *, is_writer: bool = True) -> ReplicaList:
        piece = Piece(torch.zeros(2, 3), (begin, 0))
        leaf = Sharded((4, 3), torch.float32, (piece,), is_writer=is_writer, spread_over=spread_over)
        return Replicas(0, 4).list_of(flatten({"w": leaf}), {})

    assert [item.leaf for item in listed(0, 2).items] == [0]
    assert listed(0, 2).digest != listed(2, 2).digest
    for others in (listed(0, None), listed(0, 4), listed(0, 2, is_writer=False)):
        assert others.items == (), "nobody else can hold them, or another rank writes them"
    assert [item.leaf for item in listed(0, 0).items] == [0], "the ranks of the mesh may be others than those that save"
    owners = different_owners([listed(begin, 2).items for begin in (0, 2, 0, 2)])
    assert sorted(owners.values()) == [0, 1]


def test_small_tensors_are_those_of_the_first_rank() -> None:
    listed = Replicas(0, 2).list_of(flatten({"step": torch.tensor(3.0), "w": torch.zeros(2000)}), {})
    assert [item.by_first for item in listed.items] == [True, False]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=5))
def test_ranks_with_one_digest_compute_the_same_shares(rows: list[tuple[int, int, int]]) -> None:
    """Tables that grow apart are of the same form; shares that were computed on each rank would not fit together."""
    lists = []
    for counts in rows:
        tables = {f"t{number}": HashTable(f"t{number}", 4, replicated=True) for number in range(3)}
        for table, count in zip(tables.values(), counts, strict=True):
            table.insert(torch.arange(count), torch.ones(count, 4))
        lists.append(Replicas(0, len(rows)).list_of(flatten({"w": torch.zeros(2000)}), tables))
    for one in lists:
        for other in lists:
            if one.digest == other.digest:
                assert same_owners(one.items, len(rows)) == same_owners(other.items, len(rows))


def test_lists_travel() -> None:
    items = (replica(0, 4), replica(1, 0))
    found = decode_list(ReplicaList(items).encoded(), rank=1)
    assert [(item.path, item.bytes, item.form) for item in found] == [(i.path, i.bytes, i.form) for i in items]
    assert decode_owners(dumps({"a": 3})) == {"a": 3}


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b"[1]", b'[["a",1]]', b'[["a",1,2,true]]', b'[["a",true,"f",true]]', b"\xff"]
)
def test_nonsense_from_another_rank(raw: bytes) -> None:
    with pytest.raises(CorruptError):
        decode_list(raw, rank=1)


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"a":"b"}', b'{"a":true}'])
def test_nonsense_from_the_coordinator(raw: bytes) -> None:
    with pytest.raises(CorruptError):
        decode_owners(raw)


def test_a_path_that_nobody_was_told_to_write() -> None:
    replicas = Replicas(0, 2)
    listed = replicas.list_of(flatten({"w": torch.zeros(3)}), {})
    with pytest.raises(CorruptError, match="no rank was named"):
        replicas.written_by_peers(listed, {}, "a")
