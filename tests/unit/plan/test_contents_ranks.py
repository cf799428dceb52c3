"""The parts of several ranks read as one: tensors by path, values and trees by rank, tables in shards."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncckpt.errors import CorruptError, IncompatibleError
from asyncckpt.format.head import FileFacts, ManifestHead, ParentFacts
from asyncckpt.format.manifest import Chain, Manifest
from asyncckpt.format.names import Attempt, manifest_name, shard_name, shard_path
from asyncckpt.format.read_manifest import decode_manifest
from asyncckpt.format.tree import ARRAY, TENSOR, VALUE, Node
from asyncckpt.format.write_manifest import encode_manifest, encode_part, render_body
from asyncckpt.model.block import BlockSpec, PlacedBlock, TableFacts, overlap
from asyncckpt.model.table import Column, OwnsIds, Role, TableSchema
from asyncckpt.plan.contents import contents_of, joined_tree
from asyncckpt.plan.load_plan import make_load_plan
from asyncckpt.plan.load_targets import DenseTargets

pytestmark = pytest.mark.any_core
HEADER_BYTES = 4096


@dataclass
class Part:
    """What a rank writes: float32 boxes as (leaf, name, begin, shape, whole shape), tables as (facts, columns)."""

    tree: dict[str, Node] = field(default_factory=dict)
    values: Sequence[Any] = ()
    boxes: Sequence[tuple[int | None, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = ()
    tables: Sequence[tuple[TableFacts, dict[str, torch.dtype]]] = ()

    def specs(self) -> list[BlockSpec]:
        found = []
        for leaf, name, begin, shape, whole in self.boxes:
            is_part = shape != whole
            spec = _spec(name, Role.DENSE, torch.float32, shape, leaf=leaf)
            if is_part:
                columns = tuple(begin[1:]) if any(begin[1:]) else ()
                spec = replace(spec, row_begin=begin[0], whole_shape=whole, column_begins=columns)
            found.append(spec)
        for facts, columns_of in self.tables:
            for column, dtype in columns_of.items():
                role = Role.ID if column == "id" else Role.WEIGHT
                spec = _spec(f"{facts.name}@{column}", role, dtype, (facts.rows_count,))
                found.append(replace(spec, table=facts.name, column=column, slice_info="0@1@1"))
        return found


def _spec(name: str, role: Role, dtype: torch.dtype, shape: tuple[int, ...], leaf: int | None = None) -> BlockSpec:
    code, itemsize = {torch.float32: ("F32", 4), torch.int64: ("I64", 8), torch.float64: ("F64", 8)}[dtype]
    text = str(dtype).split(".")[1]
    return BlockSpec(name, role, text, code, itemsize, shape, shape, leaf=leaf)


def manifest_of(parts: Sequence[Part], *, step: int = 1, parent: Manifest | None = None) -> Manifest:
    """Encoded and decoded again, so with every check of a reader."""
    attempt = Attempt(step=step, id=f"{step:032x}")
    bodies, files = [], []
    for rank, part in enumerate(parts):
        at, placed = HEADER_BYTES, []
        for spec in part.specs():
            placed.append(PlacedBlock(spec=spec, key=str(len(placed)), file_index=0, offset=at))
            at += spec.bytes
        tree = ("dict", tuple(part.tree), tuple(part.tree.values()))
        bodies.append(render_body([facts for facts, _ in part.tables], tree, placed))
        path = shard_path(attempt, shard_name(rank=rank, index=0))
        files.append(FileFacts(path=path, rank=rank, header_bytes=HEADER_BYTES, header_digest=bytes(16), bytes=at))
    digests = [np.zeros((len(body.holes), 16), dtype=np.uint8) for body in bodies]
    others = [
        encode_part((files[rank],), list(parts[rank].values), bodies[rank], digests[rank])
        for rank in range(1, len(parts))
    ]
    below: tuple[ParentFacts, ...] = ()
    if parent is not None:
        below = (ParentFacts(parent.step, parent.head.attempt, parent.digest), *parent.head.parents)
    head = ManifestHead(
        step=step,
        kind="delta" if below else "full",
        parents=below,
        attempt=attempt.id,
        created="now",
        writer="test",
        ranks_count=len(parts),
        files=(files[0],),
        values=tuple(parts[0].values),
        metadata={},
    )
    raw = encode_manifest(head, bodies[0], digests[0], others)
    return decode_manifest(bytes(raw), manifest_name(step))


def chain_of(*parts: Part) -> Chain:
    return Chain((manifest_of(parts),))


def test_one_tensor_of_many_parts() -> None:
    """Found by path, whatever the numbers of its leaves; blocks are numbered through all parts."""
    first = Part(tree={"a": TENSOR, "w": TENSOR}, boxes=[(1, "w", (0, 0), (2, 3), (4, 3)), (0, "a", (0,), (2,), (2,))])
    second = Part(tree={"w": TENSOR, "own": TENSOR}, boxes=[(1, "own", (), (), ()), (0, "w", (2, 0), (2, 3), (4, 3))])
    contents = contents_of(chain_of(first, second))
    assert {name: (item.path, item.blocks, item.shape) for name, item in contents.dense.items()} == {
        "w": (("w",), (0, 3), (4, 3)),
        "a": (("a",), (1,), (2,)),
        "own": (("own",), (2,), ()),
    }
    assert contents.leaf_paths == (("a",), ("w",), ("own",))
    assert contents.sure_paths == {("w",)}
    own = contents_of(chain_of(first, second), rank=1, ranks_count=2)
    assert own.leaf_paths == (("w",), ("own",))
    assert own.sure_paths == {("w",), ("own",)}
    assert own.dense == contents.dense
    assert [item.name for item in own.below(())] == ["w", "own"]


def test_a_leaf_without_a_block_anywhere_was_filtered_out() -> None:
    parts = [Part(tree={"a": TENSOR, "b": TENSOR}, boxes=[(0, "a", (), (), ())]), Part(tree={"b": TENSOR})]
    contents = contents_of(chain_of(*parts))
    assert list(contents.dense) == ["a"]
    assert contents.leaf_paths == (("a",), ("b",))


def test_a_renamed_tensor_is_known_by_its_name() -> None:
    contents = contents_of(chain_of(Part(), Part(boxes=[(None, "new", (0,), (3,), (3,))])))
    assert contents.dense["new"].path == ("new",)
    assert contents.leaf_paths == ()


def test_values_are_those_of_the_own_rank_or_of_the_lowest() -> None:
    parts = [
        Part(tree={"x": VALUE, "only0": VALUE}, values=[0, "zero"]),
        Part(tree={"x": VALUE, "only1": VALUE}, values=[1, "one"]),
        Part(tree={"only1": VALUE}, values=["two"]),
    ]
    chain = chain_of(*parts)
    assert contents_of(chain, rank=2, ranks_count=3).values == {("only1",): "two"}
    assert contents_of(chain, rank=0, ranks_count=3).values == {("x",): 0, ("only0",): "zero"}
    everything = {("x",): 0, ("only0",): "zero", ("only1",): "one"}
    assert contents_of(chain).values == everything
    assert contents_of(chain, rank=3, ranks_count=4).values == everything


def test_joined_trees() -> None:
    """Mappings and objects have the keys of all; anything else is taken whole from the lowest rank that has it."""

    def mapping(**children: Node) -> Node:
        return ("dict", tuple(children), tuple(children.values()))

    trees = [
        mapping(a=mapping(x=TENSOR), l=("list", (VALUE,)), s=("state", mapping(p=TENSOR)), v=VALUE),
        mapping(z=ARRAY, a=mapping(y=VALUE, x=VALUE), l=("list", (VALUE, TENSOR)), s=("state", mapping(q=TENSOR))),
        mapping(v=TENSOR, a=TENSOR, z=TENSOR, n=mapping()),
    ]
    assert joined_tree(trees) == mapping(
        a=mapping(x=TENSOR, y=VALUE),
        l=("list", (VALUE,)),
        s=("state", mapping(p=TENSOR, q=TENSOR)),
        v=VALUE,
        z=ARRAY,
        n=mapping(),
    )
    assert joined_tree(trees[:1] * 3) == trees[0]


COLUMNS = {"id": torch.int64, "embedding": torch.float32}


def shard_part(*shard: int, columns: dict[str, torch.dtype] = COLUMNS, **facts: Any) -> Part:
    found = TableFacts(name="user", rows_count=facts.pop("rows_count", 2), shard=(shard[0], shard[1]), **facts)
    return Part(tables=[(found, columns)])


def test_shards_of_a_table_each_down_its_own_chain() -> None:
    """Rank 1's shard is whole in the middle: its stack ends there."""
    full = manifest_of([shard_part(0, 2), shard_part(1, 2)])
    middle = manifest_of([shard_part(0, 2, whole=False), shard_part(1, 2)], step=2, parent=full)
    newest = manifest_of([shard_part(0, 2, whole=False), shard_part(1, 2, whole=False)], step=3, parent=middle)
    table = contents_of(Chain((newest, middle, full))).tables["user"]
    assert [(shard.rank, shard.shard) for shard in table.shards] == [(0, (0, 2)), (1, (1, 2))]
    assert [[layer.step for layer in shard.layers] for shard in table.shards] == [[3, 2, 1], [3, 2]]
    assert [[layer.columns["id"] for layer in shard.layers] for shard in table.shards] == [
        [(0,), (4,), (8,)],
        [(2,), (6,)],
    ]
    assert sum(layer.rows_count for layer in table.layers) == 10


def test_a_rank_may_have_no_shard() -> None:
    contents = contents_of(chain_of(Part(), shard_part(0, 1), Part()))
    assert [shard.rank for shard in contents.tables["user"].shards] == [1]


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ([shard_part(0, 2), shard_part(0, 2)], "ranks 0 and 1 hold the same shard of table 'user'"),
        ([shard_part(0, 2), shard_part(1, 2, columns={"id": torch.int64})], "other columns in rank 1"),
        (
            [shard_part(0, 2), shard_part(1, 2, columns={"id": torch.int64, "embedding": torch.float64})],
            "other columns in rank 1.*float64.*float32",
        ),
    ],
)
def test_shards_that_do_not_fit_together(parts: list[Part], match: str) -> None:
    with pytest.raises(CorruptError, match=match):
        contents_of(chain_of(*parts))


def test_chains_that_do_not_fit_together() -> None:
    full = manifest_of([shard_part(0, 2), shard_part(1, 2)])
    for parts, match in (
        ([shard_part(0, 2, whole=False)], "saved by another number of ranks"),
        ([shard_part(1, 2, whole=False), shard_part(0, 2, whole=False)], "another shard than in its base, step 1"),
    ):
        with pytest.raises(CorruptError, match=match):
            contents_of(Chain((manifest_of(parts, step=2, parent=full), full)))
    without = manifest_of([shard_part(0, 2), Part()])
    newest = manifest_of([shard_part(0, 2), shard_part(1, 2, whole=False)], step=2, parent=without)
    with pytest.raises(CorruptError, match="table 'user' of rank 1 of step 2 cannot be put together: its base, step 1"):
        contents_of(Chain((newest, without)))


class FakeTable:
    """A table of some shard; as much of one as a load plan asks for."""

    name = "user"

    def __init__(self, index: int, count: int) -> None:
        self.shard = (index, count)

    def schema(self) -> TableSchema:
        return TableSchema(
            (Column("id", torch.int64, (), Role.ID), Column("embedding", torch.float32, (), Role.WEIGHT))
        )


class OwningTable(FakeTable):
    def owned(self, ids: Any) -> Any:
        raise AssertionError("nobody has ids yet")


def sources_of(saved: int, table: Any) -> list[int]:
    chain = chain_of(*(shard_part(index, saved) for index in range(saved)))
    targets = DenseTargets(in_place=(), rebuilt=(), values=())
    plan = make_load_plan(
        chain, contents_of(chain), targets, {"user": table}, filter_func=lambda info: info, strict=True
    )
    (item,) = plan.tables
    chosen = [shard.rank for shard, _ in item.sources]
    assert sorted([*chosen, *(shard.rank for shard in item.passed_over)]) == list(range(saved))
    wanted = set(plan.wanted_blocks(chain))
    assert wanted == {2 * rank + column for rank in chosen for column in (0, 1)}
    return chosen


@pytest.mark.parametrize(("saved", "count"), [(1, 5), (4, 4), (4, 2), (6, 4), (3, 7), (5, 1), (12, 8)])
def test_only_shards_that_may_share_an_id_are_read(saved: int, count: int) -> None:
    for index in range(count):
        # Ids up to the least common multiple show every pair of remainders.
        held = {id % saved for id in range(math.lcm(saved, count)) if id % count == index}
        assert sources_of(saved, FakeTable(index, count)) == sorted(held)
    assert isinstance(OwningTable(0, count), OwnsIds)
    assert sources_of(saved, OwningTable(0, count)) == list(range(saved))


def test_shards_are_one_source_for_a_filter() -> None:
    chain = chain_of(shard_part(0, 2), shard_part(1, 2))
    targets = DenseTargets(in_place=(), rebuilt=(), values=())
    seen: list[Any] = []
    tables: dict[str, Any] = {"user": FakeTable(0, 1)}
    make_load_plan(
        chain, contents_of(chain), targets, tables, filter_func=lambda info: seen.append(info) or info, strict=True
    )
    assert seen == [{"user": {"user": ["id", "embedding"]}}]
    with pytest.raises(IncompatibleError, match=r"only in this state .*'other'"):
        make_load_plan(
            chain, contents_of(chain), targets, {"other": tables["user"]}, filter_func=lambda i: i, strict=True
        )


@pytest.mark.parametrize("seed", range(50))
def test_overlap_is_what_both_boxes_hold(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 6) for _ in range(rng.randint(0, 3))]
    ends = [[sorted((rng.randint(0, size), rng.randint(0, size))) for size in sizes] for _ in range(2)]
    masks = []
    for box in ends:
        mask = np.zeros(sizes, dtype=bool)
        mask[tuple(slice(low, high) for low, high in box)] = True
        masks.append(mask)
    begins = [[low for low, _ in box] for box in ends]
    shapes = [[high - low for low, high in box] for box in ends]
    found = overlap(begins[0], shapes[0], begins[1], shapes[1])
    both = masks[0] & masks[1]
    if found is None:
        assert not both.any()
        return
    shared = np.zeros(sizes, dtype=bool)
    places = zip(begins[0], found.first_begin, found.shape, strict=True)
    shared[tuple(slice(begin + at, begin + at + size) for begin, at, size in places)] = True
    assert (shared == both).all()
    assert [a + b for a, b in zip(begins[0], found.first_begin, strict=True)] == [
        a + b for a, b in zip(begins[1], found.second_begin, strict=True)
    ]
