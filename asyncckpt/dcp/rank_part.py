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
from asyncckpt.format.manifest import FileFacts
from asyncckpt.format.strict_json import Json
from asyncckpt.format.tree import TENSOR, VALUE, Node, check_name
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
class PartPlan:
    """What a rank writes. values: names of its plain values in the order of the tree."""

    boxes: BoxPlan
    items: tuple[WriteItem, ...]
    values: tuple[str, ...]

    @staticmethod
    def of(
        items: Sequence[WriteItem], keys: LocalKeys, paths: Mapping[str, DcpPath], *, rank: int, parallel: int
    ) -> PartPlan:
        boxes, stored, values = plan_chunks(list(map(_facts, items)), keys, paths, rank=rank, parallel=parallel)
        return PartPlan(boxes=boxes, items=tuple(items[number] for number in stored), values=tuple(values))


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
        *,
        rank: int,
        parallel: int,
    ) -> PartPlan:
        """Return the plan of a rank's part. Raises UsageError, UnsupportedError.

        items: what it writes. local: what it has, also what others write. paths: where DCP found what it flattened.
        """
        place = (rank, parallel, None if paths is None else dict(paths))
        for kept in self._kept:
            # A planner that keeps its plans gives the very same lists.
            if kept.items is items and kept.local is local and kept.facts[:1] == (place,):
                return kept.part
        keys = LocalKeys.of([*local, *items])
        tensors = [item for item in items if item.type is not WriteItemType.BYTE_IO]
        facts = (place, keys, [_facts(item) for item in tensors])
        found = next((kept.part for kept in self._kept if kept.facts == facts), None)
        part = found or PartPlan.of(tensors, keys, paths or {}, rank=rank, parallel=parallel)
        self._kept = [_Kept(local, items, facts, part), *(kept for kept in self._kept if kept.part is not part)]
        del self._kept[PLANS_KEPT_MAX:]
        return part


part_plans = PartPlans()


def _facts(item: WriteItem) -> ChunkFacts:
    data = item.tensor_data
    assert data is not None
    return item.index.fqn, data.chunk.offsets, data.chunk.sizes, data.size, data.properties.dtype


def plan_chunks(
    chunks: Sequence[ChunkFacts], keys: LocalKeys, paths: Mapping[str, DcpPath], *, rank: int, parallel: int
) -> tuple[BoxPlan, list[int], list[str]]:
    """Return the plan of the chunks that are stored, their numbers, and the names of values in the order of the tree.

    A rank may hold nothing of a tensor that is spread: such a chunk is not stored.
    """
    tree, tensor_names, value_names = tree_of(keys, paths)
    leaf_of = {name: number for number, name in enumerate(tensor_names)}
    stored = [n for n, (_, _, shape, whole_shape, _) in enumerate(chunks) if all(shape) or shape == whole_shape]
    boxes = [
        box_spec(name, dtype, begin=begin, shape=shape, whole_shape=whole_shape, leaf=leaf_of[name])
        for name, begin, shape, whole_shape, dtype in map(chunks.__getitem__, stored)
    ]
    return plan_boxes(boxes, tree, parallel=parallel, rank=rank), stored, value_names


def tree_of(keys: LocalKeys, paths: Mapping[str, DcpPath]) -> tuple[Node, list[str], list[str]]:
    """Return the tree of named leaves, and the names of its tensors and of its values in the order of the tree.

    A name whose path does not spell it was given by the planner: it is a leaf of that name below the root.
    """
    root: dict[str | int, Any] = {}
    for name, node in [*((name, TENSOR) for name in keys.tensors), *((name, VALUE) for name in keys.values)]:
        check_name(name)
        path = paths.get(name, (name,))
        if ".".join(map(str, path)) != name or not _put(root, path, (name, node)):
            root[name] = (name, node)
    names: list[tuple[str, Node]] = []
    tree = _node(root, names)
    tensors = [name for name, node in names if node is not VALUE]
    return tree, tensors, [name for name, node in names if node is VALUE]


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
