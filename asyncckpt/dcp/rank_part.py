"""What one rank contributes to a DCP checkpoint, from its plan to its part of the manifest.

Blocks are the tensors, or boxes of them, that DCP's plan gives this rank to write. The tree has all that the rank had
before DCP gave replicas to one rank each, at the paths that DCP flattened, and the plain values are this rank's own: so
a Loader finds a nested state as it was, and a rank its own values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from asyncckpt.engine.save.box_files import BoxPlan, plan_boxes
from asyncckpt.format.head import FileFacts
from asyncckpt.format.strict_json import Json
from asyncckpt.format.tree import TENSOR, VALUE, Node, check_name, leaves
from asyncckpt.format.write_manifest import BodyTemplate, PartText, encode_part
from asyncckpt.native import U8
from asyncckpt.plan.dense_blocks import box_spec

# A path as DCP flattens a state: keys of dicts as text, places in lists as numbers.
DcpPath = tuple[str | int, ...]
# What the block of a chunk depends on: name, begin, shape, shape of the whole, dtype.
ChunkFacts = tuple[str, torch.Size, torch.Size, torch.Size, torch.dtype]
PLANS_KEPT_MAX = 2


@dataclass(frozen=True)
class LocalKeys:
    """The names of everything that a rank had: tensors, and plain values."""

    tensors: tuple[str, ...]
    values: tuple[str, ...]

    @staticmethod
    def of(items: Iterable[WriteItem]) -> LocalKeys:
        items = list(items)
        values = [item.index.fqn for item in items if item.type is WriteItemType.BYTE_IO]
        tensors = [item.index.fqn for item in items if item.type is not WriteItemType.BYTE_IO]
        return LocalKeys(tensors=tuple(dict.fromkeys(tensors)), values=tuple(dict.fromkeys(values)))


@dataclass(frozen=True)
class ValueFacts:
    """What the plan of a value depends on that holds tensors or arrays: they are blocks, as where a Saver has it.

    is_written: by this rank; if several ranks have a value, DCP lets one write it.
    """

    node: Node
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]
    is_written: bool

    def __len__(self) -> int:
        return len(self.tensors)

    def chunk(self, name: str, number: int) -> ChunkFacts:
        shape, dtype = self.tensors[number]
        return inner_name(name, number, self.node), torch.Size([0] * len(shape)), shape, shape, dtype


ApartFacts = Mapping[str, ValueFacts]


def inner_name(name: str, number: int, node: Node) -> str:
    """Return what a tensor inside of a value is called; one that is all of it, as the value."""
    return name if len(node) == 1 else f"{name}#{number}"


@dataclass(frozen=True)
class PartPlan:
    """What a rank writes: tensors of items, then those inside of values, (name, which of it).

    values: its plain values in the order of the tree, by name, and which of what the value holds; None: all of it.
    """

    boxes: BoxPlan
    items: tuple[WriteItem, ...]
    inner: tuple[tuple[str, int], ...]
    values: tuple[tuple[str, int | None], ...]

    @staticmethod
    def of(
        items: Sequence[WriteItem],
        keys: LocalKeys,
        paths: Mapping[str, DcpPath],
        apart: ApartFacts,
        *,
        rank: int,
        parallel: int,
    ) -> PartPlan:
        inner = [(name, number) for name, value in apart.items() if value.is_written for number in range(len(value))]
        chunks = list(map(_facts, items)) + [apart[name].chunk(name, number) for name, number in inner]
        nodes = {name: value.node for name, value in apart.items()}
        boxes, stored, values = plan_chunks(chunks, keys, paths, nodes, rank=rank, parallel=parallel)
        own = tuple(items[number] for number in stored if number < len(items))
        return PartPlan(boxes=boxes, items=own, inner=tuple(inner), values=tuple(values))


@dataclass(frozen=True)
class SentPart:
    """A rank's part on its way to the coordinator."""

    rank: int
    attempt: str
    files: tuple[FileFacts, ...]
    values: tuple[Json, ...]
    body: BodyTemplate
    digests: U8

    @property
    def part_text(self) -> PartText:
        """The manifest's text of it, as the part of a rank other than 0."""
        return encode_part(self.files, self.values, self.body, self.digests)


@dataclass(frozen=True)
class _Kept:
    """A plan, the lists that it was made of, and what of them counts."""

    local: list[WriteItem]
    items: list[WriteItem]
    facts: tuple[Any, ...]
    part: PartPlan


class PartPlans:
    """Makes the plan of a part, and keeps the last ones: the next save of the same state takes the same."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []

    def plan(
        self,
        items: list[WriteItem],
        local: list[WriteItem],
        paths: Mapping[str, DcpPath] | None,
        apart: ApartFacts,
        *,
        rank: int,
        parallel: int,
    ) -> PartPlan:
        """Return the plan of a rank's part. Raises UsageError, UnsupportedError.

        items: what it writes. local: what it has, also what others write. paths: where DCP found what it flattened.
        apart: its values that hold tensors or arrays.
        """
        place = (rank, parallel, None if paths is None else dict(paths), dict(apart))
        for kept in self._kept:
            # A planner that keeps its plans gives the very same lists.
            if kept.items is items and kept.local is local and kept.facts[:1] == (place,):
                return kept.part
        keys = LocalKeys.of([*local, *items])
        tensors = [item for item in items if item.type is not WriteItemType.BYTE_IO]
        facts = (place, keys, [_facts(item) for item in tensors])
        found = next((kept.part for kept in self._kept if kept.facts == facts), None)
        part = found or PartPlan.of(tensors, keys, paths or {}, apart, rank=rank, parallel=parallel)
        self._kept = [_Kept(local, items, facts, part), *(kept for kept in self._kept if kept.part is not part)]
        del self._kept[PLANS_KEPT_MAX:]
        return part


part_plans = PartPlans()


def _facts(item: WriteItem) -> ChunkFacts:
    data = item.tensor_data
    assert data is not None
    return item.index.fqn, data.chunk.offsets, data.chunk.sizes, data.size, data.properties.dtype


def plan_chunks(
    chunks: Sequence[ChunkFacts],
    keys: LocalKeys,
    paths: Mapping[str, DcpPath],
    nodes: Mapping[str, Node],
    *,
    rank: int,
    parallel: int,
) -> tuple[BoxPlan, list[int], list[tuple[str, int | None]]]:
    """Return the plan of the chunks that are stored, their numbers, and the values in the order of the tree.

    A rank may hold nothing of a tensor that is spread: such a chunk is not stored. nodes: of values that hold tensors.
    """
    tree, tensor_names, value_names = tree_of(keys, paths, nodes)
    leaf_of = {name: number for number, name in enumerate(tensor_names)}
    stored = [n for n, (_, _, shape, whole_shape, _) in enumerate(chunks) if all(shape) or shape == whole_shape]
    boxes = [
        box_spec(name, dtype, begin=begin, shape=shape, whole_shape=whole_shape, leaf=leaf_of[name])
        for name, begin, shape, whole_shape, dtype in map(chunks.__getitem__, stored)
    ]
    return plan_boxes(boxes, tree, parallel=parallel, rank=rank), stored, value_names


def tree_of(
    keys: LocalKeys, paths: Mapping[str, DcpPath], nodes: Mapping[str, Node]
) -> tuple[Node, list[str], list[tuple[str, int | None]]]:
    """Return the tree of named leaves, and the names of its tensors and its values in the order of the tree.

    A name whose path does not spell it was given by the planner: it is a leaf of that name below the root.
    """
    root: dict[str | int, Any] = {}
    for name, node in [
        *((name, TENSOR) for name in keys.tensors),
        *((name, nodes.get(name, VALUE)) for name in keys.values),
    ]:
        check_name(name)
        path = paths.get(name, (name,))
        if ".".join(map(str, path)) != name or not _put(root, path, (name, node)):
            root[name] = (name, node)
    names: list[tuple[str, Node]] = []
    tree = _node(root, names)
    tensors: list[str] = []
    values: list[tuple[str, int | None]] = []
    for name, node in names:
        if name not in nodes:
            tensors += [name] if node is not VALUE else []
            values += [(name, None)] if node is VALUE else []
            continue
        inner = [leaf for _, leaf in leaves(node)]
        count = inner.count(VALUE)
        tensors += [inner_name(name, number, node) for number in range(len(inner) - count)]
        values += [(name, number) for number in range(count)]
    return tree, tensors, values


def _put(root: dict[str | int, Any], path: DcpPath, leaf: tuple[str, Node]) -> bool:
    """Put a leaf at its path, and return whether there was room."""
    at: Any = root
    for key in path[:-1]:
        at = at.setdefault(key, {})
        if not isinstance(at, dict):
            return False
    return at.setdefault(path[-1], leaf) is leaf


def _node(value: Any, names: list[tuple[str, Node]]) -> Node:
    if isinstance(value, tuple):
        names.append(value)
        node: Node = value[1]
        return node
    if value and all(type(key) is int for key in value) and sorted(value) == list(range(len(value))):
        return ("list", tuple(_node(value[index], names) for index in range(len(value))))
    keys = tuple(key if isinstance(key, str) else ("int", key) for key in value)
    return ("dict", keys, tuple(_node(child, names) for child in value.values()))
