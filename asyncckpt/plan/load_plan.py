"""Match a checkpoint with its targets: what is loaded from where, and every check before a byte is read.

What could be loaded, and the filter on it, is in load_offer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.encodings import check_encoding
from asyncckpt.format.manifest import Chain
from asyncckpt.format.tree import Path, kinds_in
from asyncckpt.format.values import COMPOSITE
from asyncckpt.model.block import BlockSpec, overlap
from asyncckpt.model.table import ID_COLUMN, Column, Role, Table, owns_ids
from asyncckpt.model.table_shard import Shard, described, make_up, may_share_ids
from asyncckpt.plan.contents import Contents, StoredDense
from asyncckpt.plan.leaf_memory import memory_of
from asyncckpt.plan.load_offer import LoadFilter, Loads, Offer, inside_modules, other_entries
from asyncckpt.plan.load_targets import (
    DenseTargets,
    InPlace,
    ObjectLeaves,
    Rebuilt,
    can_be_cast,
    overlapping_runs,
    owner_of,
)
from asyncckpt.plan.loaded_modules import ModuleSources, ResizingModules
from asyncckpt.plan.object_checks import ObjectChecks
from asyncckpt.plan.overlapping_targets import Apart, overlaps
from asyncckpt.plan.stored_tables import StoredShard, StoredTable

if TYPE_CHECKING:
    from asyncckpt.plan.changed_states import Changes
    from asyncckpt.plan.composite_loads import CompositeLoads


@dataclass(frozen=True)
class DenseLoad:
    """Fill a leaf from a stored tensor, or, with target None, a new tensor for the state dict of an object.

    given: what such a state dict gets where target is a part of it, see load_targets.py.
    """

    target: InPlace | None
    source: StoredDense
    given: Any = None

    @property
    def is_for_object(self) -> bool:
        return self.target is None or self.given is not None

    def wants(self, spec: BlockSpec) -> bool:
        """Return whether a block of the source holds something of it."""
        if self.target is None:
            return True
        boxes = ((piece.begin, tuple(piece.tensor.shape)) for piece in self.target.pieces)
        return any(overlap(spec.begin, spec.shape, begin, shape) is not None for begin, shape in boxes)


@dataclass(frozen=True)
class TableLoadPlan:
    """Fill a table from shards of its sources, each with the columns to take (`id` among them).

    passed_over: further shards of its sources, which hold no id that the table owns. resized: columns of which rows
    have another shape than was stored; each gets what both have, the rest of it is as of a new row.
    """

    name: str
    table: Table
    sources: tuple[tuple[StoredShard, tuple[str, ...]], ...]
    passed_over: tuple[StoredShard, ...] = ()
    resized: frozenset[str] = frozenset()

    @property
    def columns(self) -> frozenset[str]:
        """Those that all its sources have, and that are taken from them; all of it if there are none."""
        own = frozenset(column.name for column in self.table.schema().columns)
        return own.intersection(*(columns for _, columns in self.sources))


@dataclass(frozen=True)
class LoadPlan:
    """All that is loaded. metadata: of modules and `state_dicts`. not_given: see loaded_modules.py. apart: targets that
    overlap, see overlapping_targets.py. composites: what is done with these, where there are any. fits: what makes the
    states of objects fit, by their paths. left: objects that are not loaded, and why. is_empty: nothing is asked for.
    """

    dense: tuple[DenseLoad, ...]
    tables: tuple[TableLoadPlan, ...]
    objects: tuple[Rebuilt, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    info: Loads
    metadata: Mapping[Path, Any] = field(default_factory=dict)
    not_given: Mapping[Path, Collection[str]] = field(default_factory=dict)
    state_dicts: tuple[Rebuilt, ...] = ()
    apart: tuple[Apart, ...] = ()
    composites: CompositeLoads | None = None
    fits: Mapping[Path, Callable[[Any], Any]] = field(default_factory=dict)
    left: Mapping[Path, Sequence[str]] = field(default_factory=dict)
    is_empty: bool = False

    def of_apart(self) -> LoadPlan:
        """Return the plan of what goes into memory of its own first."""
        reads = {id(item.read) for item in self.apart}
        return replace(self, dense=tuple(load for load in self.dense if id(load.target) in reads), tables=())

    def without_apart(self) -> LoadPlan:
        """Return the plan of all but that."""
        reads = {id(item.read) for item in self.apart}
        return replace(self, dense=tuple(load for load in self.dense if id(load.target) not in reads))

    def memory_of_stored_dtype(self) -> Iterator[object]:
        """Return where tensors are that get the dtype that was stored, see `memory_of`."""
        targets = {id(item.read): item.target for item in self.apart}
        for load in self.dense:
            stored = dtype_by_name(load.source.dtype, owner=load.source.name).dtype
            if load.target is not None and load.target.pieces and load.target.dtype is stored:
                yield memory_of(targets.get(id(load.target), load.target).pieces[0].tensor)

    def wanted_blocks(self, chain: Chain) -> Iterator[int]:
        """Return the numbers of the blocks that may have to be read."""
        for load in self.dense:
            yield from (number for number in load.source.blocks if load.wants(chain.blocks[number].placed.spec))
        for item in self.tables:
            for shard, columns in item.sources:
                for layer in shard.layers:
                    yield from layer.removed
                    for column in columns:
                        yield from layer.columns.get(column, ())


def make_load_plan(
    chain: Chain,
    contents: Contents,
    targets: DenseTargets,
    tables: Mapping[str, Table],
    *,
    filter_func: LoadFilter | None = None,
    strict: bool,
    cast: bool = False,
    left_out: Callable[[], Sequence[str]] = tuple,
    is_part: bool = False,
    changes: Changes | None = None,
) -> LoadPlan:
    """Match, filter, check. IncompatibleError lists all that does not fit; UsageError for a filter's nonsense.

    cast: targets of other dtypes fit if these can be cast. left_out: returns tables that modules of the targets hold,
    and that are not destinations. With strict they do not fit a checkpoint with tables that nothing takes. is_part:
    other directories hold the rest of the tables. changes: what of the model has another name or shape now.
    """
    if strict and contents.unreadable:
        from asyncckpt.plan.load_problems import raise_unreadable

        raise_unreadable(contents.unreadable, chain.step)
    if changes is not None:
        changes.check_known([*tables, *(leaf.name for leaf in targets.in_place)])
    targets = targets.with_forms_of(contents)
    offer = Offer.of(contents, targets, tables)
    answer, missing = offer.settled(offer.filtered(filter_func), strict=strict)
    match = _Match(chain, contents, targets, strict, cast, is_part, changes)
    by_name = {item.name: item for item in targets.in_place}
    dense: list[DenseLoad] = []
    planned: list[TableLoadPlan] = []
    for destination, sources in answer.items():
        if destination in tables:
            planned.append(match.table(destination, tables[destination], sources))
        elif destination in by_name or destination in offer.loads:
            dense += match.dense(destination, by_name.get(destination), sources)
        else:
            match.problems.append(f"destination {destination!r} is neither a table nor a tensor of the model")
    loads, checks, objects = [(load.target, load.source) for load in dense], None, tuple[Rebuilt, ...]()
    if targets.rebuilt:
        of = {id(item.table): (item.columns, item.name, tuple(answer[item.name])) for item in planned}
        is_plain = strict and changes is None and filter_func is None
        checks = ObjectChecks(chain, contents, targets, loads, of, strict=strict, changes=changes, is_plain=is_plain)
        objects = checks.loaded({load.source.path for load in dense if load.is_for_object})
        match.problems += checks.incomplete
        match.of_objects, match.absent = checks.unfit, match.absent | checks.missing
        if checks.left:  # Nothing of these is filled, but what is inside of others, which are loaded.
            filled = {item.path: True for item in objects}
            dense = [load for load in dense if not load.is_for_object or owner_of(load.source.path, filled)]
    composites = None
    if targets.composites or COMPOSITE in kinds_in(contents.tree):
        from asyncckpt.plan.composite_loads import CompositeLoads  # Few states hold any.

        composites = CompositeLoads(chain, contents, targets, objects, loads)
        match.problems += composites.problems
    modules = None
    if targets.state_dicts or any(item.is_module for item in objects):
        modules = ModuleSources(objects, answer, contents, targets)
        match.problems += modules.problems
    chosen, apart = _settled(dense, chain, match.problems)
    used = {source for sources in answer.values() for source in sources}
    unexpected = sorted((contents.dense.keys() | contents.tables.keys() | contents.unreadable.keys()) - used)
    if strict:
        own = {leaf.path for leaf in targets.in_place} if filter_func is not None else ()
        inside = list(inside_modules(contents, targets, unexpected))
        more, left = [name for name, at in inside if at not in own], [name for name, at in inside if at in own]
        groups = {"only in this state": missing, "only in the checkpoint": more, "left out by the filter": left}
        match.named = {what: names for what, names in groups.items() if names}
        not_taken = [name for name in unexpected if name in contents.tables]
        empty = [path for path in targets.empty if path in contents.prefixes]
        if not_taken or empty:
            from asyncckpt.plan.load_problems import not_loaded

            match.passing += not_loaded(not_taken, left_out() if not_taken else (), empty)
    if match.problems or match.of_objects or match.passing or match.named:
        from asyncckpt.plan.load_problems import raise_problems

        raise_problems(match, chain.step, missing, unexpected, other_entries(contents, targets, unexpected))
    plan = LoadPlan(
        dense=chosen,
        tables=tuple(planned),
        objects=objects,
        metadata={} if modules is None else modules.metadata,
        not_given={} if modules is None else modules.not_given,
        state_dicts=targets.state_dicts,
        missing=(*missing, *match.absent),
        unexpected=tuple(unexpected),
        info=answer,
        apart=apart,
        composites=composites,
        fits={} if checks is None else checks.fits,
        left={} if checks is None else checks.left,
        is_empty=not (chosen or planned or objects or contents.values.keys() & targets.values)
        and bool(tables or targets.in_place or targets.rebuilt or targets.values),
    )
    match.check_encodings(plan)
    return plan


class _Match:
    """The loads of destinations from sources of a checkpoint; `absent` names the columns that stay as they are filled
    for new rows.

    problems: what does not fit. passing: what does not with `strict` alone; named: likewise, names by what they are.
    of_objects: what does not of that which objects would get. could_be_cast, could_be_resized: whether `cast`, or
    `resize`, would make something fit.
    """

    def __init__(
        self,
        chain: Chain,
        contents: Contents,
        targets: DenseTargets,
        strict: bool,
        cast: bool,
        is_part: bool,
        changes: Changes | None,
    ) -> None:
        self.problems, self.passing, self.of_objects = list[str](), list[str](), list[str]()
        self.named: dict[str, Sequence[str]] = {}
        self.absent: dict[str, None] = {}
        self.could_be_cast, self.could_be_resized, self._is_part = False, False, is_part
        self._chain, self._contents, self._targets, self._strict, self._cast = chain, contents, targets, strict, cast
        self._changes = changes
        objects = (item for item in targets.rebuilt if not item.is_module)
        self._builders = {item.path: ObjectLeaves(item, contents) for item in objects}

    def dense(self, name: str, target: InPlace | None, sources: dict[str, list[str]]) -> Iterator[DenseLoad]:
        """Return the load of a tensor; target None: for the state dict of an object."""
        if len(sources) != 1:
            self.problems.append(f"dense destination {name!r} has {len(sources)} sources, it takes exactly one")
            return
        (source,) = sources
        stored = self._contents.dense.get(source)
        if stored is None:
            self.problems.append(f"source {source!r} of {name!r} is not in the checkpoint")
            return
        if target is None:
            builder = owner_of(stored.path, self._builders)
            target, given = (None, None) if builder is None else builder.find(stored)
            yield DenseLoad(target=target, source=stored, given=given)
            return
        self._check_dtype(repr(name), target.dtype, dtype_by_name(stored.dtype, owner=source).dtype)
        if target.whole_shape != stored.shape:
            if self._resizes_itself(target, stored):
                yield DenseLoad(target=None, source=stored)
                return
            if not self._is_resized(name, target.whole_shape, stored.shape):
                self.problems.append(f"{name!r} has shape {target.whole_shape}, the checkpoint {stored.shape}")
        yield DenseLoad(target=target, source=stored)

    def _is_resized(self, name: str, shape: tuple[int, ...], stored: tuple[int, ...]) -> bool:
        """Return whether what both shapes have is to be loaded."""
        self.could_be_resized |= len(shape) == len(stored)
        return len(shape) == len(stored) and self._changes is not None and self._changes.resizes(name)

    def _resizes_itself(self, target: InPlace, stored: StoredDense) -> bool:
        owner = self._targets.owner_of(target.path)
        if owner is None or not owner.is_module or target.path != stored.path:
            return False
        return self._resizing.takes(owner, stored)

    @cached_property
    def _resizing(self) -> ResizingModules:
        return ResizingModules(self._contents)

    def table(self, name: str, table: Table, sources: dict[str, list[str]]) -> TableLoadPlan:
        schema = table.schema()
        chosen: list[tuple[StoredShard, tuple[str, ...]]] = []
        passed_over: list[StoredShard] = []
        held: list[Shard] = []
        resized: set[str] = set()
        for source, columns in sources.items():
            stored = self._contents.tables.get(source)
            if stored is None:
                self.problems.append(f"source {source!r} of table {name!r} is not in the checkpoint")
                continue
            if ID_COLUMN not in columns or len(columns) < 2 or len(set(columns)) != len(columns):
                self.problems.append(f"table {name!r} needs {ID_COLUMN!r} and at least one more column of {source!r}")
            left: set[str] = set()
            for column in columns:
                self._check_column(name, column, stored, schema.column(column), resized, left)
            if left:  # Slots of one optimizer belong together: a first moment is of no use to a new second one.
                left |= {each.name for each in schema.columns if each.role is Role.OPTIMIZER and each.name in columns}
            columns = [column for column in columns if column not in left]
            for shard in stored.shards:
                if owns_ids(table) or may_share_ids(shard.shard, table.shard):
                    chosen.append((shard, tuple(columns)))
                else:
                    passed_over.append(shard)
            held += [shard.shard for shard in stored.shards]
            absent = [c.name for c in schema.columns if c.name in left or c.name not in {*stored.columns, *columns}]
            if self._strict and absent:
                self.passing.append(f"columns {absent} of table {name!r} are missing in the checkpoint")
            self.absent |= dict.fromkeys(f"{name}@{column}" for column in absent)
        if not self._is_part and held and not make_up(held, table.shard):
            only = ", ".join(map(described, held[:8]))
            if self._strict:
                self.passing.append(f"table {name!r} takes ids of which the checkpoint has none: it has only {only}")
            self.absent[f"{name}: all but {only}"] = None
        return TableLoadPlan(name, table, tuple(chosen), tuple(passed_over), frozenset(resized))

    def _check_column(
        self, table: str, column: str, stored: StoredTable, wanted: Column | None, resized: set[str], left: set[str]
    ) -> None:
        """Compare a column with the stored one. resized, left: it is added to these if it is loaded so, or not."""
        what, numbers = f"column {column!r} of table {table!r}", stored.columns.get(column)
        if numbers is None:
            self.problems.append(f"{what} is not in the checkpoint")
            return
        if wanted is None:
            self.problems.append(f"table {table!r} has no column {column!r}")
            return
        spec = self._chain.blocks[numbers[0]].placed.spec
        if tuple(wanted.row_shape) != tuple(spec.shape[1:]):
            if self._is_resized(table, tuple(wanted.row_shape), spec.shape[1:]):
                resized.add(column)
            elif wanted.role is Role.OPTIMIZER and not self._strict:  # As in a new row.
                left.add(column)
                return
            else:
                problems = self.passing if wanted.role is Role.OPTIMIZER else self.problems
                problems.append(f"{what} has rows {wanted.row_shape}, the checkpoint {spec.shape[1:]}")
        self._check_dtype(what, wanted.dtype, dtype_by_name(spec.dtype, owner=spec.name).dtype)

    def _check_dtype(self, what: str, wanted: torch.dtype, stored: torch.dtype) -> None:
        castable = wanted is not stored and can_be_cast(stored, wanted)
        if wanted is stored or (castable and self._cast):
            return
        self.could_be_cast |= castable
        why = ", which cannot be cast to it" if self._cast else ""
        self.problems.append(f"{what} has dtype {wanted}, the checkpoint {stored}{why}")

    def check_encodings(self, plan: LoadPlan) -> None:
        """Raise UnsupportedError or CorruptError for an encoded block that no bytes could be decoded from."""
        numbers = [number for load in plan.dense for number in load.source.blocks]
        for shard, columns in (source for item in plan.tables for source in item.sources):
            numbers += [number for layer in shard.layers for column in columns for number in layer.columns[column]]
        for number in numbers:
            spec = self._chain.blocks[number].placed.spec
            if spec.encoding:
                check_encoding(spec)


def _settled(
    dense: Sequence[DenseLoad], chain: Chain, problems: list[str]
) -> tuple[tuple[DenseLoad, ...], tuple[Apart, ...]]:
    """Return the loads so that what overlaps in memory is filled once, or apart."""
    runs = overlapping_runs([load.target for load in dense])
    if not runs:
        return tuple(dense), ()
    filled, apart, different = overlaps([(load.target, load.source) for load in dense], runs, chain)
    problems += different
    chosen = [
        replace(load, target=apart[index].read) if index in apart else load
        for index, load in enumerate(dense)
        if index not in filled or load.is_for_object
    ]
    return tuple(chosen), tuple(apart.values())
