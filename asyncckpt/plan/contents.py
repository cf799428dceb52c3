"""What a checkpoint holds, by names and paths: its chain of manifests, read as one.

Dense tensors and values are those of the newest manifest. A table is a stack of layers, newest first: each one's rows,
and the ids that it takes out of those below.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asyncckpt.errors import CorruptError
from asyncckpt.format.chain import Chain
from asyncckpt.format.manifest import Manifest
from asyncckpt.format.tree import VALUE, Node, Path, descend, leaves, path_name
from asyncckpt.format.values import decode_value
from asyncckpt.model.table import Role


@dataclass(frozen=True)
class StoredDense:
    """A dense tensor of the checkpoint: its block numbers, and its path (a renamed one is known by its name alone)."""

    name: str
    path: Path
    blocks: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredLayer:
    """What the checkpoint of one step says of a table: the block numbers of its columns and of its removed ids."""

    step: int
    rows_count: int
    columns: Mapping[str, tuple[int, ...]]
    removed_count: int = 0
    removed: tuple[int, ...] = ()


@dataclass(frozen=True)
class StoredTable:
    """A table of the checkpoint. The newest layer that holds an id, as a row or as removed, tells what became of it.

    Within a layer its row counts: the id was removed, and came back.
    """

    name: str
    layers: tuple[StoredLayer, ...]

    @property
    def columns(self) -> Mapping[str, tuple[int, ...]]:
        """Every column, with its blocks in the newest layer. All layers have the same columns."""
        return self.layers[0].columns


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds. `values` are the plain ones by path, `leaf_paths` those of all tensors saved."""

    dense: Mapping[str, StoredDense]
    tables: Mapping[str, StoredTable]
    values: Mapping[Path, Any]
    leaf_paths: tuple[Path, ...]
    tree: Node
    unreadable: Mapping[str, str]  # Names of tensors whose dtype this version does not know, and the dtype.

    def has(self, path: Path) -> bool:
        """Whether something was saved at a path, be it an empty object."""
        return descend(self.tree, path) is not None

    def below(self, path: Path) -> list[StoredDense]:
        return [item for item in self.dense.values() if item.path[: len(path)] == path]

    def blocks(self) -> Iterator[int]:
        """The numbers of all blocks that the checkpoint is put together from."""
        for item in self.dense.values():
            yield from item.blocks
        for layer in (layer for table in self.tables.values() for layer in table.layers):
            yield from layer.removed
            for numbers in layer.columns.values():
                yield from numbers


def contents_of(chain: Chain) -> Contents:
    """Index a chain by names and paths. CorruptError for layers that disagree, or a value that cannot be decoded."""
    newest = chain.newest
    paths = [path for path, node in leaves(newest.tree) if node is not VALUE]
    value_paths = [path for path, node in leaves(newest.tree) if node is VALUE]
    dense: dict[str, list[int]] = defaultdict(list)
    unreadable: dict[str, str] = {}
    for number, block in enumerate(newest.blocks):
        spec = block.placed.spec
        if spec.role is Role.PAD:
            continue
        if not spec.is_known:
            unreadable[spec.name] = spec.dtype
        elif spec.table is None:
            dense[spec.name].append(number)
    stored = {}
    for name, numbers in dense.items():
        spec = newest.blocks[numbers[0]].placed.spec
        path = paths[spec.leaf] if spec.leaf is not None else (name,)
        shape = spec.whole_shape or spec.shape
        stored[name] = StoredDense(name=name, path=path, blocks=tuple(numbers), dtype=spec.dtype, shape=shape)
    values = {
        path: decode_value(value, owner=f"value {path_name(path)!r} of step {newest.step}")
        for path, value in zip(value_paths, newest.head.values, strict=True)
    }
    return Contents(
        dense=stored,
        tables=_tables(chain),
        values=values,
        leaf_paths=tuple(paths),
        tree=newest.tree,
        unreadable=unreadable,
    )


def _tables(chain: Chain) -> dict[str, StoredTable]:
    """Every table of the newest manifest, with its layers down to one that is whole."""
    layers: dict[str, list[StoredLayer]] = defaultdict(list)
    ended: set[str] = set()
    for depth, (manifest, first) in enumerate(_numbered(chain)):
        found = _layers(manifest, first)
        for table in manifest.tables:
            if table.name in ended or (depth > 0 and table.name not in layers):
                continue
            layers[table.name].append(found[table.name])
            if table.whole:
                ended.add(table.name)
        for name in layers.keys() - found.keys() - ended:
            steps = " -> ".join(map(str, chain.steps))
            raise CorruptError(
                f"table {name!r} of step {chain.step} cannot be put together: step {manifest.step}, which it builds "
                f"upon, does not have it; chain {steps} (full)"
            )
    tables = {name: StoredTable(name=name, layers=tuple(stack)) for name, stack in layers.items()}
    for stored in tables.values():
        _check_layers(stored, chain)
    return {name: stored for name, stored in tables.items() if stored.columns}


def _numbered(chain: Chain) -> Iterator[tuple[Manifest, int]]:
    """Every manifest with the number of its first block."""
    first = 0
    for manifest in chain.manifests:
        yield manifest, first
        first += len(manifest.blocks)


def _layers(manifest: Manifest, first: int) -> dict[str, StoredLayer]:
    """What one manifest says of every table that it lists."""
    columns: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    removed: dict[str, list[int]] = defaultdict(list)
    for number, block in enumerate(manifest.blocks, first):
        spec = block.placed.spec
        if spec.table is None or not spec.is_known:
            continue
        if spec.role is Role.REMOVED:
            removed[spec.table].append(number)
        else:
            columns[spec.table][str(spec.column)].append(number)
    return {
        table.name: StoredLayer(
            step=manifest.step,
            rows_count=table.rows_count,
            columns={name: tuple(numbers) for name, numbers in columns[table.name].items()},
            removed_count=table.removed_count,
            removed=tuple(removed[table.name]),
        )
        for table in manifest.tables
    }


def _check_layers(table: StoredTable, chain: Chain) -> None:
    """All layers have the same columns, of the same dtypes and row shapes."""
    expected = _forms(table.columns, chain)
    for layer in table.layers:
        found = _forms(layer.columns, chain)
        if found != expected:
            differing = sorted(name for name in found.keys() | expected if found.get(name) != expected.get(name))
            raise CorruptError(
                f"checkpoint of step {chain.step}: table {table.name!r} has other columns in step {layer.step}, "
                "upon which it builds",
                found={name: found.get(name) for name in differing[:5]},
                expected={name: expected.get(name) for name in differing[:5]},
            )


def _forms(columns: Mapping[str, tuple[int, ...]], chain: Chain) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and row shape of every column."""
    specs = {name: chain.blocks[numbers[0]].placed.spec for name, numbers in columns.items()}
    return {name: (spec.dtype, spec.shape[1:]) for name, spec in specs.items()}
