"""Find the collections of multi-level tables in a model, wherever they are, and the tables that a checkpoint holds.

The walk visits every module once, as torch's own `modules()` does, so a module that contains itself, or is used twice,
is nothing special. Depth counts from 1 at the root, by the shortest way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from asyncckpt.errors import UsageError, Words, must_be
from asyncckpt.model.table import Table
from asyncckpt.tables.emb_cache_modules import EmbCacheCollection
from asyncckpt.tables.embedding import HashEmbedding

DEPTH_MAX = 500
CHILDREN_MAX = 500
PATH_SHOWN_MAX = 80


def find_collections(module: object) -> dict[str, EmbCacheCollection]:
    """Return path in the module -> collection; the path of the module itself is "".

    Raises UsageError when it is not a module, when it is deeper than 500 or a module in it has more than 500 children,
    as with RecSDK, or when it holds no collection.
    """
    if not isinstance(module, nn.Module):
        hint = "tensors and other state are saved with asyncckpt.Saver"
        raise must_be("module", "a torch.nn.Module", type(module), hint=hint)
    modules = list(_walk(module))
    found = {path: item for path, item in modules if isinstance(item, EmbCacheCollection)}
    if not found:
        raise _nothing_found([item for _, item in modules])
    return found


def _walk(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) of all modules, level by level: torch's own walk recurses, and visits the longest way first.

    Raises UsageError beyond DEPTH_MAX and CHILDREN_MAX.
    """
    seen = {id(module)}
    level: list[tuple[str, nn.Module]] = [("", module)]
    for _ in range(DEPTH_MAX):
        yield from level
        below: list[tuple[str, nn.Module]] = []
        for path, item in level:
            children = list(item.named_children())
            if len(children) > CHILDREN_MAX:
                what = f"module {path or 'itself'!r} has too many children"
                hint = "put them into several modules"
                raise UsageError(what, found=len(children), expected=f"at most {CHILDREN_MAX}", hint=hint)
            for name, child in children:
                if id(child) not in seen:
                    seen.add(id(child))
                    below.append((f"{path}.{name}" if path else name, child))
        level = below
    if level:
        shown = level[0][0][:PATH_SHOWN_MAX] + "..."
        raise UsageError("module is nested too deeply", found=shown, expected=f"at most {DEPTH_MAX} levels")


@dataclass(frozen=True)
class SavedTables:
    """The tables of a model by name, and their companions (such as counts of candidates) as `<table>.<suffix>`."""

    tables: Mapping[str, Table]
    companions: Mapping[str, Table]

    @property
    def all(self) -> dict[str, Table]:
        return {**self.tables, **self.companions}

    def is_same(self, other: SavedTables) -> bool:
        """Return whether both are the same objects under the same names."""
        one, two = self.all, other.all
        return one.keys() == two.keys() and all(one[name] is two[name] for name in one)

    @property
    def world_size(self) -> int:
        """How many ranks there are, as tables of one of them say."""
        return next((table.shard[1] for table in self.tables.values()), 1)

    def check_shard(self, *, rank: int, world_size: int | None) -> None:
        """Raise UsageError when a table does not hold just the ids of this rank; world_size None: of any number."""
        count = self.world_size if world_size is None else world_size
        for name, table in self.tables.items():
            if tuple(table.shard) != (rank, count):
                raise UsageError(
                    f"table {name!r} does not belong to this rank",
                    found=Words(f"shard {tuple(table.shard)}"),
                    expected=(rank, "the number of ranks" if world_size is None else world_size),
                    hint="EmbCacheSharded...Collection gives its tables the shard of their rank",
                )


def saved_tables(module: object) -> SavedTables:
    """Return the tables of all collections in a module. Raises UsageError, also when two tables have one name."""
    tables: dict[str, Table] = {}
    companions: dict[str, Table] = {}
    owners: dict[str, str] = {}
    for path, collection in find_collections(module).items():
        own = collection.tables()
        for name, table in collection.saved_tables().items():
            if name in owners:
                places = f"{owners[name] or 'the module itself'!r} and {path or 'the module itself'!r}"
                raise UsageError(f"two tables have the name {name!r}, in {places}", hint="give every table its own")
            owners[name] = path
            (tables if name in own else companions)[name] = table
    return SavedTables(tables=tables, companions=companions)


def empty_tables(tables: Iterable[Table]) -> None:
    """Take all rows out of tables."""
    for table in tables:
        table.begin_load(clear=True, rows_count=0, filled=()).end(True)


def _nothing_found(modules: list[nn.Module]) -> UsageError:
    hints = []
    if any(isinstance(item, HashEmbedding) for item in modules):
        hints.append("save hash tables with asyncckpt.Saver(hashtables=...)")
    if any(True for item in modules for _ in (*item.parameters(recurse=False), *item.buffers(recurse=False))):
        hints.append("save dense state with asyncckpt.Saver(tensors={'model': dense_state_of(module)})")
    return UsageError(
        "module holds no multi-level tables",
        found=type(modules[0]),
        expected="an EmbCacheEmbeddingBagCollection or EmbCacheEmbeddingCollection, or a module around one",
        hint=", ".join(hints) or None,
    )
