"""The tables of a checkpoint: what each rank holds of them, as stacks of layers down the chain of manifests.

A table is saved in shards, one by every rank that holds some of it. The shard of a rank is laid over that of the same
rank in the step below, down to one that is whole. No id is in two shards.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from asyncckpt.errors import CorruptError, warn
from asyncckpt.format.manifest import Chain, RankPart
from asyncckpt.model.block import TableFacts
from asyncckpt.model.table import Role
from asyncckpt.model.table_shard import Shard, buckets_of, described, make_up


@dataclass(frozen=True)
class StoredLayer:
    """What the checkpoint of one step says of a shard: the block numbers of its columns and of its removed ids."""

    step: int
    rows_count: int
    columns: Mapping[str, tuple[int, ...]]
    removed_count: int = 0
    removed: tuple[int, ...] = ()

    def blocks(self) -> Iterator[int]:
        """Return the numbers of all its blocks."""
        yield from self.removed
        for numbers in self.columns.values():
            yield from numbers


@dataclass(frozen=True)
class StoredShard:
    """What one rank has saved of a table. The newest layer that holds an id, as a row or as removed, decides what
    became of it. Within a layer its row counts: the id was removed, and came back.

    name   of the table
    shard  which ids it holds; (0, 1): all, or some that the table chooses by another rule
    """

    name: str
    rank: int
    shard: Shard
    layers: tuple[StoredLayer, ...]

    def blocks(self) -> Iterator[int]:
        """Return the numbers of all its blocks."""
        return itertools.chain.from_iterable(layer.blocks() for layer in self.layers)


@dataclass(frozen=True)
class StoredTable:
    """A table of the checkpoint: the shards of all ranks that have it, at least one."""

    name: str
    shards: tuple[StoredShard, ...]

    @property
    def columns(self) -> Mapping[str, tuple[int, ...]]:
        """Every column, with its blocks in one layer. All layers of all shards have the same columns."""
        return self.shards[0].layers[0].columns

    @property
    def layers(self) -> list[StoredLayer]:
        """All layers of all shards."""
        return [layer for shard in self.shards for layer in shard.layers]

    def warn_of_part(self) -> None:
        """Warn if not all of the table is there, before it goes where nothing tells of shards."""
        held = [shard.shard for shard in self.shards]
        if not make_up(held):
            only = ", ".join(map(described, held[:8]))
            warn(f"asyncckpt: the checkpoint has only a part of table {self.name!r}: {only}", RuntimeWarning)


# Of a manifest: its layers by rank and table.
_Layers = dict[tuple[int, str], tuple[TableFacts, StoredLayer]]


def stored_tables(chain: Chain) -> dict[str, StoredTable]:
    """Return every table of the newest manifest. CorruptError for layers or shards that do not fit together."""
    newest = chain.newest
    for manifest in chain.manifests:
        if manifest.head.ranks_count != newest.head.ranks_count:
            raise CorruptError(
                f"step {chain.step} cannot be put together: its base, step {manifest.step}, was saved by "
                "another number of ranks",
                found=manifest.head.ranks_count,
                expected=newest.head.ranks_count,
            )
    found: list[_Layers] = []
    first = 0
    for manifest in chain.manifests:
        layers: _Layers = {}
        for part in manifest.parts:
            layers |= _layers_of_part(part, first, manifest.step)
            first += len(part.blocks)
        found.append(layers)
    shards: dict[str, list[StoredShard]] = defaultdict(list)
    for part in newest.parts:
        for facts in part.tables:
            stack = tuple(_stack(chain, part.rank, facts, found))
            shards[facts.name].append(StoredShard(facts.name, part.rank, facts.shard, stack))
    for name, own in shards.items():
        _check_shards(name, own, chain)
    tables = {name: StoredTable(name=name, shards=tuple(own)) for name, own in shards.items()}
    return {name: table for name, table in tables.items() if table.columns}


def _layers_of_part(part: RankPart, first: int, step: int) -> _Layers:
    """Return what one rank's part of a manifest holds of every table. `first` is the number of its first block."""
    columns: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    removed: dict[str, list[int]] = defaultdict(list)
    for number, block in enumerate(part.blocks, first):
        spec = block.placed.spec
        if spec.table is None or not spec.is_known:
            continue
        if spec.role is Role.REMOVED:
            removed[spec.table].append(number)
        else:
            columns[spec.table][str(spec.column)].append(number)
    return {
        (part.rank, table.name): (
            table,
            StoredLayer(
                step=step,
                rows_count=table.rows_count,
                columns={name: tuple(numbers) for name, numbers in columns[table.name].items()},
                removed_count=table.removed_count,
                removed=tuple(removed[table.name]),
            ),
        )
        for table in part.tables
    }


def _stack(chain: Chain, rank: int, newest: TableFacts, found: Sequence[_Layers]) -> Iterator[StoredLayer]:
    """Return the layers of a shard, newest first, down to one that is whole."""
    for manifest, layers in zip(chain.manifests, found, strict=True):
        facts, layer = layers.get((rank, newest.name), (None, None))
        if facts is None or layer is None:
            steps = " -> ".join(map(str, chain.steps))
            of_rank = f" of rank {rank}" if chain.newest.head.ranks_count > 1 else ""
            raise CorruptError(
                f"table {newest.name!r}{of_rank} of step {chain.step} cannot be put together: its base, step "
                f"{manifest.step}, does not have it; chain {steps} (full)"
            )
        if facts.shard != newest.shard:
            raise CorruptError(
                f"table {newest.name!r} of rank {rank} of step {chain.step} holds another shard than in its "
                f"base, step {manifest.step}",
                found=facts.shard,
                expected=newest.shard,
            )
        yield layer
        if facts.whole:
            break


def _check_shards(name: str, shards: Sequence[StoredShard], chain: Chain) -> None:
    """Check that all layers of all shards have the same columns, dtypes and row shapes, and no shard is there twice."""
    held: dict[tuple[int, int, int], int] = {}
    for shard in shards:
        other = held.setdefault(buckets_of(shard.shard), shard.rank)
        # (0, 1) says nothing: such tables may own ranges of ids.
        if other != shard.rank and shard.shard != (0, 1):
            raise CorruptError(
                f"checkpoint of step {chain.step}: ranks {other} and {shard.rank} hold the same shard of table "
                f"{name!r}",
                found=shard.shard,
            )
    expected = _forms(shards[0].layers[0].columns, chain)
    for shard in shards:
        for layer in shard.layers:
            found = _forms(layer.columns, chain)
            if found != expected:
                differing = sorted(key for key in found.keys() | expected if found.get(key) != expected.get(key))
                where = f"its base, step {layer.step}" if layer.step != chain.step else f"rank {shard.rank}"
                raise CorruptError(
                    f"checkpoint of step {chain.step}: table {name!r} has other columns in {where}",
                    found={key: found.get(key) for key in differing[:5]},
                    expected={key: expected.get(key) for key in differing[:5]},
                )


def _forms(columns: Mapping[str, tuple[int, ...]], chain: Chain) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and row shape of every column."""
    specs = {name: chain.blocks[numbers[0]].placed.spec for name, numbers in columns.items()}
    return {name: (spec.dtype, spec.shape[1:]) for name, spec in specs.items()}
