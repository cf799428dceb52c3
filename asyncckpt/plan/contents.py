"""What a checkpoint holds, by names and paths: its chain of manifests, and the parts of its ranks, read as one.

Dense tensors and values are those of the newest manifest. A tensor is found by its path, whichever ranks wrote the
boxes of it; one that is tied to another has that one's blocks. Plain values, and what a state consists of, may differ
from rank to rank: a reader that is one of as many ranks gets its own, any other one those of all ranks together. Where
these differ, the lower rank counts: of mappings, and of the states of objects, every key that some rank has, in the
order of the lower rank; anything else is taken as a whole.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from asyncckpt.errors import CorruptError
from asyncckpt.format.head import SealedHead
from asyncckpt.format.manifest import Chain, Manifest, RankPart
from asyncckpt.format.strict_json import Json
from asyncckpt.format.tree import (
    VALUE,
    Node,
    Path,
    descend,
    leaves,
    mapping_node,
    module_metadata,
    object_paths,
    path_name,
    tensor_paths,
    unique_names,
)
from asyncckpt.format.values import COMPOSITE, MAPPINGS, decode_value
from asyncckpt.model.sharing import SharedView
from asyncckpt.model.table import Role
from asyncckpt.plan.stored_tables import StoredTable, stored_tables


@dataclass(frozen=True)
class StoredDense:
    """A dense tensor of the checkpoint: its block numbers, and its path (a renamed one is known by its name alone)."""

    name: str
    path: Path
    blocks: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds, as one rank sees it.

    values       the plain ones by path
    tree         of the reader's own rank, or of all
    leaf_paths   the paths of all tensors in `tree`
    sure_paths   those of tensors and values that any reader's state has: the own rank's, or those that all ranks have
    unreadable   names of tensors whose dtype this version does not know, and the dtype
    shared       of memory that several tensors lie in: its bytes, and by path where in it they are
    classes      names of those of the objects at these paths, as far as they are known
    own_blocks   the numbers of those that the reader's own rank has written; None where there were not as many ranks
    """

    dense: Mapping[str, StoredDense]
    tables: Mapping[str, StoredTable]
    values: Mapping[Path, Any]
    leaf_paths: tuple[Path, ...]
    sure_paths: frozenset[Path]
    tree: Node
    unreadable: Mapping[str, str]
    shared: tuple[tuple[int, Mapping[Path, SharedView]], ...] = ()
    classes: Mapping[Path, tuple[str, ...]] = field(default_factory=dict)
    own_blocks: range | None = None

    def has(self, path: Path) -> bool:
        """Return whether something was saved at a path, be it an empty object."""
        return descend(self.tree, path) is not None

    def below(self, path: Path) -> list[StoredDense]:
        """Return the tensors at and below a path of the tree."""
        return [item for item in self.dense.values() if item.path[: len(path)] == path and item.path in self._in_tree]

    @cached_property
    def prefixes(self) -> frozenset[Path]:
        """The paths at or below which the tree has tensors."""
        found = (item.path for item in self.dense.values() if item.path in self._in_tree)
        return frozenset(path[:end] for path in found for end in range(len(path) + 1))

    @cached_property
    def _in_tree(self) -> frozenset[Path]:
        return frozenset(self.leaf_paths)

    def blocks(self) -> Iterator[int]:
        """Return the numbers of all blocks that the checkpoint is put together from."""
        for item in self.dense.values():
            yield from item.blocks
        for table in self.tables.values():
            for shard in table.shards:
                yield from shard.blocks()


def contents_of(chain: Chain, *, rank: int = 0, ranks_count: int = 1) -> Contents:
    """Index a chain by names and paths, for a reader that is rank `rank` of `ranks_count`.

    CorruptError for layers or ranks that disagree, or a value that cannot be decoded.
    """
    newest = chain.newest
    parts, own_blocks = newest.parts, None
    if newest.head.ranks_count == ranks_count:
        first = sum(len(part.blocks) for part in parts[:rank])
        parts, own_blocks = (parts[rank],), range(first, first + len(parts[rank].blocks))
    tree = joined_tree([part.tree for part in parts])
    all_leaves = dict(leaves(tree))
    all_values = joined_values(parts)
    values = {}
    for path, node in all_leaves.items():
        if node is VALUE:
            of_rank, value = all_values[path]
            shown = f" of rank {of_rank}" if newest.head.ranks_count > 1 else ""
            values[path] = decode_value(value, owner=f"value {path_name(path)!r}{shown} of step {newest.step}")
    dense, unreadable = stored_dense(newest)
    found = Contents(
        dense=dense,
        tables=stored_tables(chain) if any(part.tables for part in newest.parts) else {},
        values=values,
        leaf_paths=tuple(path for path, node in all_leaves.items() if node is not VALUE),
        sure_paths=frozenset(all_leaves).intersection(*(dict(leaves(it.tree)) for it in parts if it.tree != tree)),
        tree=tree,
        unreadable=unreadable,
        shared=tuple(_shared(parts)),
        classes=_classes(parts),
        own_blocks=own_blocks,
    )
    if not chain.is_part:
        return found
    from asyncckpt.plan.chosen_contents import chosen, inside  # Of few loads and exports.

    return chosen(found, chain.only) if chain.only is not None else inside(found, chain.inside)


def stored_dense(newest: Manifest) -> tuple[dict[str, StoredDense], dict[str, str]]:
    """Return the dense tensors of all ranks by name, and what cannot be read. Names are already checked."""
    numbers: dict[Path | str, list[int]] = defaultdict(list)
    unreadable: dict[str, str] = {}
    number = -1
    for part, paths in zip(newest.parts, paths_by_part(newest.parts), strict=True):
        for block in part.blocks:
            number += 1
            spec = block.placed.spec
            if spec.role is Role.PAD:
                continue
            if not spec.is_known:
                unreadable[spec.name] = spec.dtype
            elif spec.table is None:
                numbers[spec.name if spec.leaf is None else paths[spec.leaf]].append(number)
    dense: dict[str, StoredDense] = {}
    for key, blocks in numbers.items():
        spec = newest.blocks[blocks[0]].placed.spec
        name = _free_name(spec.name, dense)
        dense[name] = StoredDense(
            name=name,
            path=(key,) if isinstance(key, str) else key,
            blocks=tuple(blocks),
            dtype=spec.dtype,
            shape=spec.shape if spec.whole_shape is None else spec.whole_shape,
        )
    _add_tied(dense, newest.parts)
    return dense, unreadable


def tied_names(manifest: Manifest) -> dict[str, str]:
    """Return the names of tensors without blocks of their own, each with the name of the tensor that has them."""
    owners: dict[tuple[int, ...], str] = {}
    found = stored_dense(manifest)[0].values()
    return {item.name: owner for item in found if (owner := owners.setdefault(item.blocks, item.name)) != item.name}


def _free_name(name: str, dense: Mapping[str, StoredDense]) -> str:
    """Return a name for another tensor: of different ranks, two may have one name at different paths."""
    return name if name not in dense else unique_names([name], taken=dense)[0]


def _add_tied(dense: dict[str, StoredDense], parts: Sequence[RankPart]) -> None:
    """Add what has no blocks on any rank because it is tied to what has, or to what is tied in turn on another rank."""
    if not any(part.sharing.tied for part in parts):
        return
    stored = {item.path: item for item in dense.values()}
    tied: dict[Path, tuple[str, Path]] = {}
    for part, paths in zip(parts, paths_by_part(parts), strict=True):
        for item in part.sharing.tied:
            tied.setdefault(paths[item.leaf], (item.name, paths[item.of]))
    ends: dict[Path, Path] = {}
    for path, (own_name, _) in tied.items():
        way: dict[Path, None] = {}
        at = path
        while at not in stored and at in tied and at not in way and at not in ends:
            way[at] = None
            at = tied[at][1]
        ends |= dict.fromkeys(way, ends.get(at, at))
        owner = ends.get(path, path)
        if path not in stored and owner in stored:
            name = _free_name(own_name, dense)
            dense[name] = replace(stored[owner], name=name, path=path)


def _shared(parts: Sequence[RankPart]) -> Iterator[tuple[int, Mapping[Path, SharedView]]]:
    seen: set[Path] = set()
    for part, paths in zip(parts, paths_by_part(parts), strict=True):
        for memory in part.sharing.memories:
            views = {paths[view.leaf]: view for view in memory.views}
            if seen.isdisjoint(views):
                seen.update(views)
                yield memory.bytes, views


def _classes(parts: Sequence[RankPart]) -> dict[Path, tuple[str, ...]]:
    named = [part for part in reversed(parts) if part.classes]
    return {path: names for part in named for path, names in zip(object_paths(part.tree), part.classes, strict=True)}


def joined_tree(trees: Sequence[Node]) -> Node:
    """Return the tree of all ranks, in their order."""
    return functools.reduce(_joined, trees)


def _joined(first: Node, second: Node) -> Node:
    if first == second or COMPOSITE in (first[0], second[0]):
        return first
    if first[0] != second[0] and not {first[0], second[0]}.issubset(MAPPINGS):
        return first
    if first[0] == "state":
        return ("state", _joined(first[1], second[1]))
    if first[0] not in MAPPINGS:
        return first
    theirs = dict(zip(second[1], second[2], strict=True))
    children = [
        _joined(child, theirs[key]) if key in theirs else child for key, child in zip(first[1], first[2], strict=True)
    ]
    known = frozenset(first[1])
    new = [key for key in second[1] if key not in known]
    said = [metadata for node in (second, first) if (metadata := module_metadata(node)) is not None]
    joined = {name: local for metadata in said for name, local in metadata.items()} if said else None
    return mapping_node(first[0], (*first[1], *new), (*children, *(theirs[key] for key in new)), joined)


def paths_by_part(parts: Iterable[RankPart]) -> Iterator[list[Path]]:
    """Return the paths of every part's tensors. Most ranks have the same tree: then it is the same list."""
    tree: Node | None = None
    paths: list[Path] = []
    for part in parts:
        if part.tree != tree:
            tree, paths = part.tree, tensor_paths(part.tree)
        yield paths


def joined_values(parts: Iterable[RankPart]) -> dict[Path, tuple[int, Json]]:
    """Return every plain value by its path, of the lowest rank that has it, with that rank."""
    found: dict[Path, tuple[int, Json]] = {}
    for part in parts:
        own = (path for path, node in leaves(part.tree) if node is VALUE)
        for path, value in zip(own, part.values, strict=True):
            found.setdefault(path, (part.rank, value))
    return found


def named_values(manifest: Manifest) -> dict[str, Any]:
    """Return all plain values of a checkpoint by dotted name; where ranks differ, the lower one's."""
    found = joined_values(manifest.parts)
    names = unique_names(map(path_name, found))
    return {
        name: decode_value(value, owner=f"value {name!r} of step {manifest.step}")
        for name, (_, value) in zip(names, found.values(), strict=True)
    }


def metadata_of(sealed: SealedHead) -> dict[str, Any]:
    """Return the user's metadata. CorruptError for what cannot be decoded."""
    metadata = sealed.head.metadata
    if type(metadata) is not dict:
        raise CorruptError(f"metadata of step {sealed.head.step} is not an object")
    return {key: decode_value(value, owner=f"metadata[{key!r}]") for key, value in metadata.items()}
