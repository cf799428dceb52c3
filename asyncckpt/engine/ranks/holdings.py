"""What each rank holds of a table: what the table says of it, and whether what all ranks say fits together.

a table says                      and is here
shard=(index, count), count > 1   the ids whose unsigned value modulo count is index
shard=(begin, end, size)          the ids whose unsigned value modulo size is in [begin, end)
a range of rows (HoldsRange)      these rows; a replica where they are all
a rule of its own (OwnsIds)       the ids that the rule owns, which no other rank can check
replicated (Replicated)           a replica: all ids, the same rows on every rank that has the table
nothing                           refused where several ranks save together
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

import numpy as np

from asyncckpt.coordination.messages import malformed
from asyncckpt.errors import ConflictError, UsageError, Words, must_be
from asyncckpt.format.strict_json import Json
from asyncckpt.model.row_runs import rows_of
from asyncckpt.model.table import ID_COLUMN, CountsIds, HoldsRange, IdsHeld, OwnsIds, Table, TableCut
from asyncckpt.model.table_shard import buckets_of, described, is_part, make_up, may_share_ids
from asyncckpt.tables.table_arguments import ids_held

TOGETHER_HINT = (
    "make the Saver on every rank, with ranks=RankOptions(process_group=torch.distributed.group.WORLD), or with "
    "shard_index and shard_num"
)
REPLICA_HINT = "a table of which every rank has rows of its own is a shard: shard=(rank, ranks_count)"


@dataclass(frozen=True, order=True)
class TableSlice:
    """The ids of a table that a rank holds: those in [first, end) after division by `modulus`, unsigned.

    modulus 0: the ids in [first, end) themselves, of a table with [0, whole). All of it 0: nothing is known of them.
    """

    modulus: int
    first: int
    end: int
    whole: int = field(default=0, compare=False)

    @property
    def is_known(self) -> bool:
        return self.end > 0 or self.whole > 0

    @property
    def is_empty(self) -> bool:
        """A range of no rows, as of a rank more than a table has rows: beside it, all of them are one rank's."""
        return self.is_known and not self.modulus and self.first == self.end

    def __str__(self) -> str:
        if not self.is_known:
            return "ids by a rule of its own"
        if not self.modulus:
            return f"rows {self.first} to {self.end}"
        is_one = self.end == self.first + 1
        return described((self.first, self.modulus) if is_one else (self.first, self.end, self.modulus))

    def encoded(self) -> Json:
        return [self.modulus, self.first, self.end, self.whole]


def is_replicated(table: Table) -> bool:
    """Return whether a table is a Replicated with replicated=True; asked at every save, so not by isinstance."""
    return getattr(table, "replicated", False) is True


def is_whole(table: Table) -> bool:
    """Return whether a table holds all ids there are of it: one of the same name on another rank is its replica."""
    if is_replicated(table):
        return True
    if table.shard != (0, 1):
        return False
    if isinstance(table, HoldsRange):
        first, end, whole = table.id_range()
        return first == 0 and end == whole
    return not isinstance(table, OwnsIds)


def slice_of(table: Table) -> TableSlice:
    """Return what this rank holds of a table that is not whole."""
    if isinstance(table, HoldsRange):
        return TableSlice(0, *table.id_range())
    if table.shard == (0, 1) and isinstance(table, OwnsIds):
        return TableSlice(0, 0, 0)
    begin, end, size = buckets_of(table.shard)
    return TableSlice(size, begin, end)


def held_by(table: Table, cut: TableCut | None) -> IdsHeld:
    """Return what a replicated table holds. cut: the table is frozen by it; None: it need not be, for a CountsIds."""
    if isinstance(table, CountsIds):
        return table.ids_held()
    if cut is not None:
        return ids_held(np.ascontiguousarray(cut.column(ID_COLUMN).cpu().numpy()[rows_of(cut.runs)]))
    cut = table.begin_cut()
    try:
        return held_by(table, cut)
    finally:
        cut.fence()
        cut.end(False)


def check_said(tables: Mapping[str, Table], *, index: int, count: int, may_be_parts: bool = False) -> None:
    """Raise UsageError, where `count` ranks save together, for tables that do not say what this one holds of them.

    A rank that saves alone must hold all of each, unless may_be_parts: its caller has said that it does so knowingly.
    """
    if count == 1:
        for name, table in () if may_be_parts else tables.items():
            _check_all_here(name, table)
        return
    silent = [name for name, table in tables.items() if not _says_what_it_is(table)]
    if silent:
        names = ", ".join(map(repr, silent))
        raise UsageError(
            f"{f'tables {names} do' if len(silent) > 1 else f'table {names} does'} not say which ids this rank holds, "
            f"and {count} ranks save together",
            hint=f"HashTable(..., shard=({index}, {count})) for the ids with id % {count} == {index}; "
            "shard=(begin, end, 65536) for a slice of RecIS; replicated=True if all ranks hold the same rows; OwnsIds "
            "for a rule of your own",
        )
    for name, table in tables.items():
        if len(table.shard) == 2 and table.shard[1] == count and table.shard[0] != index:
            raise must_be(f"shard of table {name!r} on this rank", f"({index}, {count})", table.shard)


def _check_all_here(name: str, table: Table) -> None:
    if is_part(table.shard) or (isinstance(table, HoldsRange) and not is_whole(table)):
        raise UsageError(
            f"table {name!r} is a part, and this rank saves alone: the rest would not be saved",
            found=Words(slice_of(table)),
            hint=f"{TOGETHER_HINT}; with RankOptions(alone=True) it is saved as a part",
        )


def _says_what_it_is(table: Table) -> bool:
    return table.shard != (0, 1) or is_replicated(table) or isinstance(table, (HoldsRange, OwnsIds))


def check_slices(
    by_rank: Sequence[Mapping[str, TableSlice]], whole: Sequence[set[str]], *, are_all: bool = True
) -> None:
    """Raise ConflictError when two ranks may hold the same id of a table, or none of them some ids, or one of them a
    replica, the other a slice.

    by_rank, whole: of every rank, the slices of tables that are spread, and the names of those that it holds in full.
    are_all: all ranks are there, so what none of them holds is nowhere.
    """
    holders: dict[str, list[tuple[TableSlice, int]]] = {}
    for rank, slices in enumerate(by_rank):
        for name, own in slices.items():
            replica_on = next((other for other, names in enumerate(whole) if name in names), None)
            if replica_on is not None and own.is_empty:
                continue
            if replica_on is not None:
                what = f"table {name!r} is a replica on rank {replica_on}, and a part of it on rank {rank}"
                raise ConflictError(what, found=Words(own), hint="declare it alike on all ranks")
            holders.setdefault(name, []).append((own, rank))
    for name, held in holders.items():
        by_rule = [rank for own, rank in held if not own.is_known]
        if by_rule and len(by_rule) < len(held):
            known, rank = next((own, rank) for own, rank in held if own.is_known)
            what = f"table {name!r} holds ids by a rule of its own on rank {by_rule[0]}, and others on rank {rank}"
            raise ConflictError(what, found=Words(known), hint="declare it alike on all ranks")
        twice = _overlap(held)
        if twice is not None:
            (one, first), (other, second) = sorted(twice, key=lambda item: item[1])
            raise ConflictError(
                f"table {name!r}: ranks {first} and {second} hold the same ids",
                found=sorted({str(one), str(other)}),
                hint="give every rank a shard of its own, or save from ranks that hold each slice once",
            )
        shards = {(own.first, own.end, own.modulus): rank for own, rank in held if own.modulus}
        if are_all and (not make_up(shards) if shards else _lack_rows([own for own, _ in held])):
            raise ConflictError(
                f"table {name!r}: some ids are on no rank, so a part of it would be saved as the whole",
                found={f"rank {rank}": str(own) for own, rank in held[:8]},
                hint="every id belongs to one rank: shard=(rank, ranks_count), or slices that make up all buckets"
                if shards
                else "save from all ranks that have rows of it",
            )


def _lack_rows(held: list[TableSlice]) -> bool:
    """Return whether ranges of rows, which do not overlap, leave some out."""
    own_rows = [own for own in held if own.first < own.end]
    ends = {0, *(own.end for own in own_rows)}
    return max(ends) < max(own.whole for own in held) or any(own.first not in ends for own in own_rows)


def _overlap(held: list[tuple[TableSlice, int]]) -> tuple[tuple[TableSlice, int], tuple[TableSlice, int]] | None:
    """Return two of the ranks' slices that have an id in common; None if there are none."""
    by_modulus: dict[int, list[tuple[TableSlice, int]]] = {}
    for own, rank in sorted(held):
        if own.first < own.end:
            by_modulus.setdefault(own.modulus, []).append((own, rank))
    for same in by_modulus.values():
        for one, other in pairwise(same):
            if other[0].first < one[0].end:
                return one, other
    for some, others in combinations(by_modulus.values(), 2):
        for one in some:
            for other in others:
                if _have_common_id(one[0], other[0]):
                    return one, other
    return None


def _have_common_id(one: TableSlice, other: TableSlice) -> bool:
    """Whether some id is in both slices, whose moduli differ."""
    if not one.modulus or not other.modulus:
        return True  # A range of rows beside a shard: no rule says that they are apart.
    return may_share_ids((one.first, one.end, one.modulus), (other.first, other.end, other.modulus))


def check_ids_held(by_rank: Mapping[int, Mapping[str, IdsHeld]]) -> None:
    """Raise ConflictError when a replicated table does not hold the same ids on all ranks that have it."""
    first: dict[str, tuple[int, IdsHeld]] = {}
    for rank, tables in by_rank.items():
        for name, held in tables.items():
            other, expected = first.setdefault(name, (rank, held))
            if held != expected:
                others = "" if held.count != expected.count else ", other ones"
                raise ConflictError(
                    f"table {name!r} is declared as replicated, and is not the same on ranks {other} and {rank}",
                    found=Words(f"{held.count} ids{others}"),
                    expected=f"{expected.count} ids",
                    hint=REPLICA_HINT,
                )


def encode_ids_held(tables: Mapping[str, IdsHeld]) -> Json:
    return {name: [held.count, f"{held.fingerprint:x}"] for name, held in tables.items()}


def decode_ids_held(value: Json, *, owner: str) -> dict[str, IdsHeld]:
    """Return what another rank has sent; CorruptError for anything else."""
    if type(value) is not dict:
        raise malformed(owner, "counts of replicated tables")
    found = {}
    for name, item in value.items():
        match item:
            case [int() as count, str() as fingerprint] if re.fullmatch("[0-9a-f]{1,16}", fingerprint):
                found[name] = IdsHeld(count, int(fingerprint, 16))
            case _:
                raise malformed(owner, f"a count of table {name!r}")
    return found


def decode_slices(value: Json, *, owner: str) -> dict[str, TableSlice]:
    """Return the slices of tables that another rank has sent; CorruptError for anything else."""
    if type(value) is not dict:
        raise malformed(owner, "slices of tables")
    slices = {}
    for name, item in value.items():
        numbers = [number for number in item if type(number) is int and number >= 0] if type(item) is list else []
        if type(item) is not list or not len(item) == len(numbers) == 4:
            raise malformed(owner, f"a slice of table {name!r}")
        slices[name] = TableSlice(*numbers)
    return slices
