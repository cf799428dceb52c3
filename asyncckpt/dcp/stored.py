"""A checkpoint as DCP's metadata: every dense tensor with its chunks, every plain value, and where DCP flattened them.

Made only from the manifest, of any checkpoint: a name is the dotted path, a chunk is a block. Plain values are
those of the first rank that has them. Tables are not DCP's business and are left out, as are tensors of dtypes that
this torch does not know.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from asyncckpt.dcp.rank_part import DcpPath
from asyncckpt.errors import UnsupportedError
from asyncckpt.format.dtypes import dtype_by_name, is_in_torch
from asyncckpt.format.manifest import Chain, RankPart
from asyncckpt.format.strict_json import Json
from asyncckpt.format.tree import TENSOR, VALUE, Node, key_value, leaves, unique_names
from asyncckpt.format.values import MAPPINGS, encode_value
from asyncckpt.model.table import Role

DCP_VERSION = "1.0.0"


@dataclass(frozen=True)
class Stored:
    """blocks: the number of the block of every chunk. values: still encoded, by name; apart: those that hold tensors or
    arrays, with these, which are not in the metadata."""

    chain: Chain
    metadata: Metadata
    blocks: dict[MetadataIndex, int]
    values: dict[str, Json]
    apart: dict[str, tuple[ValueApart, dict[str, TensorStorageMetadata]]]


def stored_of(chain: Chain, *, keeps_values: bool) -> Stored:
    """Index the newest manifest of a chain, whose blocks have its first numbers.

    keeps_values: what DCP has as one value is one: an array, a tuple of tensors. Else the tensors in it are DCP's.
    """
    items: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    blocks: dict[MetadataIndex, int] = {}
    values: dict[str, Json] = {}
    paths: dict[str, DcpPath] = {}
    tied: dict[str, str] = {}
    number = 0
    for part in chain.newest.parts:
        named = _Names.of(part, keeps_values=keeps_values)
        paths = {**named.paths, **paths}
        for name, value in named.values.items():
            values.setdefault(name, value)
        for leaf in part.sharing.tied:
            tied.setdefault(named.tensors[leaf.leaf], named.tensors[leaf.of])
        for block in part.blocks:
            spec = block.placed.spec
            if spec.table is None and spec.role is not Role.PAD and is_in_torch(spec.dtype):
                name = spec.name if spec.leaf is None else named.tensors[spec.leaf]
                paths.setdefault(name, (name,))
                dtype = dtype_by_name(spec.dtype, owner=name).dtype
                index = MetadataIndex(name, spec.begin)
                new = TensorStorageMetadata(
                    TensorProperties(dtype), torch.Size(spec.whole_shape or spec.shape), chunks=[]
                )
                item = items.setdefault(name, new)
                assert isinstance(item, TensorStorageMetadata)
                item.chunks.append(ChunkStorageMetadata(offsets=torch.Size(spec.begin), sizes=torch.Size(spec.shape)))
                blocks[index] = number
            number += 1
    _add_tied(tied, items, blocks)
    apart: dict[str, tuple[ValueApart, dict[str, TensorStorageMetadata]]] = {}
    for name, value in values.items():
        if isinstance(value, ValueApart):
            # A write filter may have left out one of them: then the value is left out, as such a tensor is.
            inner = {each: items.pop(each) for each in value.names(name) if each in items}
            apart[name] = value, {each: item for each, item in inner.items() if isinstance(item, TensorStorageMetadata)}
    for name in [name for name, (value, inner) in apart.items() if len(inner) < value.tensors_count]:
        del values[name], apart[name]
    for name in list(values):
        if name in items:  # A tensor on one rank, a plain value on another: DCP has room for one.
            del values[name]
            apart.pop(name, None)
        else:
            items[name] = BytesStorageMetadata()
    metadata = _metadata(items, {name: paths[name] for name in items}, blocks)
    return Stored(chain=chain, metadata=metadata, blocks=blocks, values=values, apart=apart)


def _add_tied(
    tied: Mapping[str, str],
    items: dict[str, TensorStorageMetadata | BytesStorageMetadata],
    blocks: dict[MetadataIndex, int],
) -> None:
    """Add tensors that have the blocks of another one, or of what that is tied to on another rank."""
    for name in tied:
        owner, seen = name, set[str]()
        while owner not in items and owner in tied and owner not in seen:
            seen.add(owner)
            owner = tied[owner]
        found = items.get(owner)
        if owner != name and isinstance(found, TensorStorageMetadata):
            items[name] = dataclasses.replace(found, chunks=list(found.chunks))
            for chunk in found.chunks:
                blocks[MetadataIndex(name, chunk.offsets)] = blocks[MetadataIndex(owner, chunk.offsets)]


def _metadata(items: dict[str, Any], paths: dict[str, DcpPath], blocks: dict[MetadataIndex, int]) -> Metadata:
    members: dict[str, Any] = {
        "state_dict_metadata": items,
        "planner_data": paths,
        "storage_data": blocks,
        "storage_meta": StorageMeta(),
        "version": DCP_VERSION,
    }
    known = {field.name for field in dataclasses.fields(Metadata)}
    return Metadata(**{name: value for name, value in members.items() if name in known})


@dataclass(frozen=True)
class _Names:
    """One rank's part: the names of its tensors in the order of leaves, its values, and where all of them are."""

    tensors: list[str]
    values: dict[str, Json]
    paths: dict[str, DcpPath]

    @staticmethod
    def of(part: RankPart, *, keeps_values: bool) -> _Names:
        found = list(_flattened(part.tree, iter(part.values), (), keeps_values=keeps_values))
        tensors = [path for path, value in found if value is _TENSOR]
        values = [(path, value) for path, value in found if value is not _TENSOR]
        tensor_names = unique_names(map(_dotted, tensors))
        value_names = unique_names((_dotted(path) for path, _ in values), taken=tensor_names)
        plain, of_values = iter(tensor_names), iter(value_names)
        by_leaf: list[str] = []
        for _, value in found:
            if value is _TENSOR:
                by_leaf.append(next(plain))
            else:
                name = next(of_values)
                by_leaf += value.names(name) if isinstance(value, ValueApart) else []
        return _Names(
            tensors=by_leaf,
            values=dict(zip(value_names, (value for _, value in values), strict=True)),
            paths=dict(zip([*tensor_names, *value_names], [*tensors, *(path for path, _ in values)], strict=True)),
        )


@dataclass(frozen=True)
class ValueApart:
    """A value that holds tensors or arrays: its node, its plain values, still encoded, and how many others it has."""

    node: Node
    values: tuple[Json, ...]
    tensors_count: int

    @staticmethod
    def of(node: Node, values: Iterator[Json]) -> ValueApart:
        found = [leaf for _, leaf in leaves(node)]
        count = found.count(VALUE)
        return ValueApart(node, tuple(itertools.islice(values, count)), len(found) - count)

    def names(self, name: str) -> list[str]:
        """Return what its tensors are called, which is not a name of a state."""
        return [f"{name}\0{number}" for number in range(self.tensors_count)]


# Stands for a tensor where encoded values stand for themselves.
_TENSOR: Any = object()


def _flattened(
    node: Node, values: Iterator[Json], path: DcpPath, *, keeps_values: bool
) -> Iterator[tuple[DcpPath, Json]]:
    """Yield what DCP would flatten the state into: tensors and encoded values, with their paths.

    Keys of dicts become text. A tuple is one value, and so is a list that holds neither tensors nor dicts.
    """
    if keeps_values and node not in (TENSOR, VALUE) and _holds_tensors(node) and not _is_traversed(node):
        yield path, ValueApart.of(node, values)
    elif len(node) == 1:
        yield path, next(values) if node is VALUE else _TENSOR
    elif node[0] in MAPPINGS:
        for key, child in zip(node[1], node[2], strict=True):
            yield from _flattened(child, values, (*path, str(key_value(key))), keeps_values=keeps_values)
    elif node[0] == "state":
        yield from _flattened(node[1], values, path, keeps_values=keeps_values)
    elif not _holds_tensors(node) and (node[0] == "tuple" or not _holds_dicts(node)):
        yield path, _collapsed(node, values)
    else:
        for index, child in enumerate(node[1]):
            yield from _flattened(child, values, (*path, index), keeps_values=keeps_values)


def _is_traversed(node: Node) -> bool:
    """Return whether DCP looks into a node: into mappings, and lists that hold these or tensors, but into no tuple."""
    if node[0] != "list":
        return node[0] in (*MAPPINGS, "state")
    return any(child is TENSOR or _is_traversed(child) for child in node[1])


def check_keys(node: Node, path: DcpPath = ()) -> None:
    """Raise UnsupportedError where two keys of a mapping would be the same text in DCP."""
    if len(node) == 1:
        return
    if node[0] in MAPPINGS:
        keys = [str(key_value(key)) for key in node[1]]
        same = next((key for key, count in Counter(keys).items() if count > 1), None)
        if same is not None:
            what = f"two keys of {_dotted(path)!r} would be the same in DCP, whose keys are text"
            raise UnsupportedError(what, found=same, hint="a file of torch.save keeps them apart")
    else:
        keys = [""] * len(_children(node))
    for key, child in zip(keys, _children(node), strict=True):
        check_keys(child, (*path, key))


def _holds_tensors(node: Node) -> bool:
    return node is not VALUE if len(node) == 1 else any(map(_holds_tensors, _children(node)))


def _holds_dicts(node: Node) -> bool:
    """Return whether a list contains dicts, also in lists in it."""
    return node[0] in (*MAPPINGS, "state") or (node[0] == "list" and any(map(_holds_dicts, node[1])))


def _children(node: Node) -> tuple[Node, ...]:
    if node[0] == "state":
        return (node[1],)
    children: tuple[Node, ...] = node[2] if node[0] in MAPPINGS else node[1]
    return children


def _collapsed(node: Node, values: Iterator[Json]) -> Json:
    """Return a node without tensors as one encoded value."""
    if node is VALUE:
        return next(values)
    if node[0] == "state":
        return _collapsed(node[1], values)
    children = [_collapsed(child, values) for child in _children(node)]
    if node[0] in MAPPINGS:
        keys = [encode_value(key_value(key), owner="key") for key in node[1]]
        return {node[0]: [list(pair) for pair in zip(keys, children, strict=True)]}
    return children if node[0] == "list" else {"tuple": children}


def _dotted(path: DcpPath) -> str:
    return ".".join(map(str, path))
